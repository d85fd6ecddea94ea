"""Copies these scripts, what they import of the frameworks, and a wheel into a folder that runs on a GPU host:

    python -m callers.pack FOLDER --source NAME=PATH ... [--wheel WHEEL]

Copy FOLDER to the host and run FOLDER/check there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

from . import sources, stand_ins

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m callers.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=PATH", help="as of python -m callers")
    parser.add_argument("--wheel", type=Path, help="of crates/python; without it, check needs MOEXPRESS_SITE")
    arguments = parser.parse_args()
    try:
        found = sources.parse(arguments.source)
    except ValueError as error:
        parser.error(str(error))
    if arguments.wheel is not None and not arguments.wheel.is_file():
        parser.error(f"no wheel at {str(arguments.wheel)!r}")
    folder = arguments.folder
    for name, source in found.items():
        there = folder / "sources" / name
        shutil.rmtree(there, ignore_errors=True)
        for module in sources.modules(name):
            file = stand_ins.file_of(source.path, module)
            copy = there / file.relative_to(source.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        (there / "COMMIT").write_text(source.commit + "\n")
    shutil.rmtree(folder / "callers", ignore_errors=True)
    shutil.copytree(HERE, folder / "callers", ignore=shutil.ignore_patterns("__pycache__", ".*", "check"))
    shutil.copy(HERE / "check", folder / "check")
    if arguments.wheel is not None:
        shutil.rmtree(folder / "site", ignore_errors=True)
        zipfile.ZipFile(arguments.wheel).extractall(folder / "site")
    size = sum(file.stat().st_size for file in (folder / "sources").rglob("*.py"))
    print(f"{folder}: {size} bytes of frameworks; run {folder}/check on the GPU host")
    return 0


if __name__ == "__main__":
    sys.exit(main())
