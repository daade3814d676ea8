"""Files of a release agree with the package: version, licence, changelog, and a workflow that stores no secret; PyPI
shows no broken link."""

from __future__ import annotations

import re
import runpy
import tomllib

import pytest
import yaml
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

SETUP = runpy.run_path(str(ROOT / "setup.py"))
TARGETS = re.compile(r"\]\(([^)]*)\)")


@pytest.mark.parametrize("address", [None, "https://example.org/posttrain"])
def test_no_link_of_the_description_on_pypi_is_relative(address: str | None) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = SETUP["description"](readme, address)
    targets = TARGETS.findall(text)
    assert [target for target in targets if not re.match("https?://", target)] == []
    if address is None:
        assert not targets and "first run, own reward, own environment" in text
        return
    inside = [target.removeprefix(f"{address}/blob/HEAD/").partition("#")[0] for target in targets]
    assert "docs/start/install.md" in inside and f"{address}/raw/HEAD/docs/view/overview.png" in targets
    assert all((ROOT / path).exists() for path in inside if "://" not in path)


def test_the_package_takes_that_description_for_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert given["long_description"] == SETUP["description"](readme, PROJECT.get("urls", {}).get("Source"))
    assert given["long_description_content_type"] == "text/markdown" and PROJECT["dynamic"] == ["readme"]


def test_citation_and_changelog_name_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {name: str(citation[name]) for name in ("title", "version", "license")} == {
        "title": PROJECT["name"], "version": PROJECT["version"], "license": PROJECT["license"],
    }  # fmt: skip
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["authors"]
    versions = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == PROJECT["version"]


def test_the_release_workflow_publishes_tags_alone_and_without_a_secret() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert publish["if"] == "github.ref_type == 'tag'" and workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text and "password" not in text
    commands = " ".join(step.get("run", "") for step in workflow["jobs"]["build"]["steps"])
    assert "python -m build" in commands and "twine check --strict" in commands
