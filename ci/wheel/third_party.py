#!/usr/bin/env python3
"""Writes the licences of all packages that are linked into the wheel into a file: third_party.py FILE

cargo-bundle-licenses knows the texts of all packages that the workspace could ever need, on any system; cargo knows which of these are
linked into the wheel. A package without its licence's text ends this, unless another package of its repository has it.
"""

import json
import subprocess
import sys
from pathlib import Path

CRATE = Path(__file__).resolve().parents[2] / "crates" / "python"
MISSING = "NOT FOUND"


def said(*command: str) -> str:
    """What a command prints, run in the folder of the crate."""
    ended = subprocess.run(command, cwd=CRATE, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"third_party.py: {' '.join(command)} failed:\n{ended.stderr}")
    return ended.stdout


def linked() -> set[tuple[str, str]]:
    """Names and versions of what is linked, this repository's own packages left out."""
    tree = said("cargo", "tree", "--edges", "normal", "--prefix", "none", "--no-dedupe", "--format", "{p}")
    packages = {tuple(line.split()[:2]) for line in tree.splitlines() if line and "(/" not in line}
    return {(name, version.removeprefix("v")) for name, version in packages}


def texts(package: dict, all_packages: list[dict]) -> list[str]:
    """The texts of a package's licences: one of them is enough."""
    same = [other for other in all_packages if other["repository"] and other["repository"] == package["repository"]]
    names = {licence["license"] for licence in package["licenses"]}
    for of in [package, *same]:
        found = [own["text"] for own in of["licenses"] if own["license"] in names and own["text"] != MISSING]
        if found:
            return found
    raise SystemExit(
        f"third_party.py: licence of {package['package_name']} {package['package_version']} is {package['license']} without its text, "
        "allowed: a package that has it"
    )


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: third_party.py FILE")
    bundle = json.loads(said("cargo", "bundle-licenses", "--format", "json"))["third_party_libraries"]
    wanted = linked()
    packages = [package for package in bundle if (package["package_name"], package["package_version"]) in wanted]
    unknown = wanted - {(package["package_name"], package["package_version"]) for package in packages}
    if unknown or not packages:
        raise SystemExit(f"third_party.py: nothing is known of {sorted(unknown)}")
    parts = [
        "Packages that are linked into this wheel, and their licences. Rust's standard library has a file of its own.\n"
    ]
    for package in packages:
        parts.append(
            f"{'=' * 100}\n{package['package_name']} {package['package_version']}: {package['license']}\n{package['repository']}\n"
        )
        parts += [f"\n{text.strip()}\n" for text in texts(package, bundle)]
    Path(sys.argv[1]).write_text("\n".join(parts), encoding="utf-8")
    print(f"licences of {len(packages)} packages")


if __name__ == "__main__":
    main()
