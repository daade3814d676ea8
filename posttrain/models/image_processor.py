"""Converts pictures to pixels and to placeholder tokens; no other module does either.

transformers' image processor of the checkpoint computes the pixels, with PIL. The number of a picture's placeholders
follows from the shape of its pixels and from config.json; the model must return as many features.

grid     the processor cuts a picture into patches and returns their grid (Qwen-VL)
tiles    it cuts a large picture into tiles of one size, and adds a small version of the whole (Idefics3, SmolVLM)
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.messages import one_line
from posttrain.core.pictures import PICTURES, PictureError, decoded
from posttrain.core.types import UserError
from posttrain.models.json_files import read_text

if TYPE_CHECKING:
    from torch import Tensor

FILES = ("preprocessor_config.json", "processor_config.json")
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Entries of config.json that name a placeholder token."""
PLACE = "\ufffc"
"""The object replacement character: used in our texts, and replaced by the model's placeholder before tokenization."""
REMEMBERED = 1 << 28  # bytes of pixels that are cached


@dataclass(frozen=True)
class Pixels:
    """A processed picture."""

    inputs: Mapping[str, Tensor]  # arguments of the model's `get_image_features`
    count: int  # placeholders: one for each feature
    text: str  # its text in the prompt, with `PLACE` for each placeholder
    grid: tuple[int, ...] = ()  # positions of its features in time, height and width, for models with such positions


class ImageProcessor:
    """The image processor of one checkpoint. The content of its files identifies it, so that a tokenizer and a model
    share one.
    """

    def __init__(self, source: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Create the processor. `source`: the model's config.json; `files`: name and text of the processor's files."""
        self.source, self.files = source, dict(files)
        self.id: int = placeholder_ids(source)[0]
        text = source.get("text_config")
        text = text if isinstance(text, dict) else source
        rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
        self.places = "mrope_section" in rope  # whether positions are in time, height and width
        self._theirs: Any = None
        self._known: OrderedDict[str, Pixels] = OrderedDict()
        self._room = REMEMBERED
        self._lock = threading.Lock()  # threads of engines and of a learner share it

    @staticmethod
    def of(folder: Path, source: Mapping[str, Any]) -> ImageProcessor | None:
        """Return the processor of a checkpoint folder; None if its config.json, `source`, names no placeholder."""
        if not placeholder_ids(source):
            return None
        files = {name: read_text(folder / name) for name in FILES if (folder / name).exists()}
        return _known(json.dumps(source, sort_keys=True), tuple(files.items()))

    def __deepcopy__(self, memo: Any) -> ImageProcessor:
        return self

    def pixels(self, digest: str) -> Pixels:
        """Process the picture with this hash. Raises PictureError if it is damaged, or if the processor refuses it."""
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
            found = self._made(digest)
            self._known[digest] = found
            self._room -= _size(found)
            while self._room < 0 and len(self._known) > 1:
                self._room += _size(self._known.popitem(last=False)[1])
            return found

    def _made(self, digest: str) -> Pixels:
        what = f"the picture sha256:{digest[:12]}..."
        image = decoded(PICTURES.read(digest), what)
        theirs = self._opened()
        more = {"return_row_col_info": True} if hasattr(theirs, "return_row_col_info") else {}
        try:
            made = dict(theirs(images=[image], return_tensors="pt", **more))
        except Exception as error:  # it raises many kinds of errors
            raise PictureError(f"{what} is refused by the model's image processor: {one_line(error)}") from None
        rows, columns = (made.pop(name)[0][0] if name in made else None for name in ("rows", "cols"))
        if "image_grid_thw" in made:
            return self._in_grid(made)
        if rows is not None and columns is not None:
            return self._in_tiles(made, int(rows), int(columns))
        raise PictureError(
            f"the picture placeholders of a {self.source.get('model_type')} are not supported: give a model with a "
            "grid (Qwen-VL) or tiles (Idefics3, SmolVLM)"
        )

    def _in_grid(self, made: dict[str, Tensor]) -> Pixels:
        merged = int(self._vision("spatial_merge_size", 2))
        if getattr(self._theirs, "merge_size", merged) != merged:
            raise UserError(
                f"preprocessor_config.json merges {self._theirs.merge_size} patches a side, and the model {merged}: copy "
                "the file of this model"
            )
        time, height, width = map(int, made["image_grid_thw"][0])
        grid = (time, height // merged, width // merged)
        count = grid[0] * grid[1] * grid[2]
        return Pixels(made, count, PLACE * count, grid if self.places else ())

    def _in_tiles(self, made: dict[str, Tensor], rows: int, columns: int) -> Pixels:
        """Return the pixels with placeholders as `Idefics3Processor.replace_image_token` writes them."""
        height, width = made["pixel_values"].shape[-2:]
        patch, scale = int(self._vision("patch_size", 32)), int(self.source.get("scale_factor", 2))
        each = (height // patch) * (width // patch) // scale**2
        around, tile = "<fake_token_around_image>", PLACE * each
        text = ""
        for row in range(rows):
            text += "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
        text += ("\n" if rows and columns else "") + f"{around}<global-img>{tile}{around}"
        return Pixels(made, (rows * columns + 1) * each, text)

    def _vision(self, name: str, default: int) -> Any:
        vision = self.source.get("vision_config")
        return vision.get(name, default) if isinstance(vision, dict) else default

    def _opened(self) -> Any:
        if self._theirs is None:
            if not self.files:
                raise PictureError(
                    f"the model's folder holds no image processor ({' or '.join(FILES)}), which pictures need: copy it there"
                )
            self._theirs = _of_transformers(self.source, self.files)
        return self._theirs


def placeholder_ids(source: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of placeholders of pictures (the first), videos and sounds; () for text-only models."""
    found = [source[name] for name in PLACEHOLDERS if type(source.get(name)) is int]
    return tuple(dict.fromkeys(found)) if isinstance(source.get("vision_config"), dict) else ()


@lru_cache(maxsize=8)
def _known(source: str, files: tuple[tuple[str, str], ...]) -> ImageProcessor:
    return ImageProcessor(json.loads(source), dict(files))


def _of_transformers(source: Mapping[str, Any], files: Mapping[str, str]) -> Any:
    """Build transformers' image processor with its PIL backend, which needs no torchvision and gives the same pixels on
    every machine.
    """
    # imported from its module: in some versions the import from `transformers` requires torchvision for any backend
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {**files, "config.json": json.dumps(source)}.items():
            (folder / file).write_text(text, encoding="utf-8")
        try:
            return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except Exception as error:
            if (found := _by_its_own_name(folder, source, files)) is not None:
                return found
            raise UserError(f"transformers cannot open {' or '.join(files)}: {one_line(error)}") from None


def _by_its_own_name(folder: Path, source: Mapping[str, Any], files: Mapping[str, str]) -> Any:
    """Build the processors of Idefics3 and SmolVLM, which transformers 5.17 wrongly believes to require torchvision."""
    kind = source.get("model_type")
    try:
        told = [json.loads(text) for text in files.values()]
        named = next(
            name for t in told for s in (t, t.get("image_processor", {})) if (name := s.get("image_processor_type"))
        )
        module = import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
        return getattr(module, f"{named.removesuffix('Fast')}Pil").from_pretrained(folder, local_files_only=True)
    except Exception:  # report the first error
        return None


def _size(pixels: Pixels) -> int:
    return sum(x.numel() * x.element_size() for x in pixels.inputs.values())
