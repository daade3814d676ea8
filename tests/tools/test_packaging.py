"""Files of a release agree with the package: version, licence, changelog, and a workflow that stores no secret."""

from __future__ import annotations

import re
import tomllib

import yaml
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
