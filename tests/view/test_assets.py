"""The files of the page: small, complete, what npm holds, and without ways to run data."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

from agentrl.view.bundle import script, single_file, static_text, write_folder

STATIC = Path(str(files("agentrl.view"))) / "static"
OWN = sorted(path for path in STATIC.iterdir() if path.suffix in {".js", ".css", ".html"})


def test_everything_together_is_at_most_205_kB():
    sizes = {str(path.relative_to(STATIC)): path.stat().st_size for path in STATIC.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 205_000, sizes


def test_vendored_files_are_what_their_checksums_say():
    vendor = STATIC / "vendor"
    sums = dict(reversed(line.split()) for line in (vendor / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {path.name for path in vendor.iterdir()} - {"SHA256SUMS", "LICENSES.txt"}
    for name, digest in sums.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    # htm 3.1.1's preact/standalone.module.js and uPlot 1.6.32's dist/uPlot.iife.min.js, as npm holds them
    assert sums["htm-preact.js"] == "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
    assert sums["uPlot.js"] == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    licenses = (vendor / "LICENSES.txt").read_text()
    assert "Apache License, Version 2.0" in licenses
    for owner in ("2015-present Jason Miller", "2022 Leon Sorokin"):  # Preact and uPlot, both under one text
        assert f"Copyright (c) {owner}" in licenses
    assert "Permission is hereby granted" in licenses


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_can_run_data_or_asks_the_network(path):
    text = path.read_text(encoding="utf-8")
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write"
    forbidden = markup + r"|\beval\(|new Function|\bimport\("
    assert not re.search(forbidden, text)
    assert not re.search(r"https?://(?!x/)|//cdn", text)  # http://x/ is the base of a URL that is only taken apart


def test_every_module_is_reached_and_imports_what_exists():
    whole = script()
    for path in OWN:
        if path.suffix != ".js":
            continue
        assert f'modules["{path.name}"] = ' in whole, f"no module imports {path.name}"
        for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            exported = re.search(r"\nreturn \{ (.*) \};\n", whole[whole.index(f'modules["{module}"] = ') :])
            have = {pair.split(":")[0] for pair in exported[1].split(", ")}
            assert {name.split(" as ")[0].strip() for name in names.split(",")} <= have, (path.name, module)


def test_the_document_has_no_inline_script_or_style():
    page = static_text("index.html")
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page)


def test_an_export_holds_hostile_answers_as_inert_text(tmp_path):
    hostile = "</script><script>alert(1)</script><!--  \ud800 \x00"
    html = "".join(single_file([('/api/"><b>', {"text": hostile})], renderers={}, title="</title><script>"))
    assert html.count("<script>") == 3  # uPlot, the answers' reader, the page
    assert "alert(1)\\u003c/script" in html
    html.encode()  # a lone surrogate would not
    write_folder(
        tmp_path / "export", [("/api/a", {"text": hostile, "__proto__": {"a": 1}})], renderers={}, title="a"
    )
    text = (tmp_path / "export" / "data" / "000000.js").read_text(encoding="utf-8")
    assert "<" not in text
