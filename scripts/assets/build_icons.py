"""Rewrite static/icons.svg from an unpacked lucide-static package; the names come from static/vendor/VENDOR.toml.

npm pack lucide-static@1.62.0 && tar xzf lucide-static-1.62.0.tgz && python scripts/assets/build_icons.py package
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

STATIC = Path(__file__).resolve().parents[2] / "static"
# 1.75 instead of lucide's 2: the sprite is drawn at 16 px, where 2 looks heavier than Geist at 13 px.
STROKE = 'stroke="currentColor" stroke-width="1.75" stroke-linecap="round" stroke-linejoin="round"'


def main(package: Path) -> None:
    names = tomllib.loads((STATIC / "vendor" / "VENDOR.toml").read_text())["icons"]["names"]
    symbols = [symbol(name, (package / "icons" / f"{name}.svg").read_text()) for name in names]
    sprite = f'<svg xmlns="http://www.w3.org/2000/svg">{"".join(symbols)}</svg>\n'
    (STATIC / "icons.svg").write_text(sprite)
    print(f"{len(names)} icons; sha256 for VENDOR.toml: {hashlib.sha256(sprite.encode()).hexdigest()}")


def symbol(name: str, svg: str) -> str:
    """Return the icon's shapes as one <symbol>; only the 24 px view box of the outer <svg> is kept."""
    shapes = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    shapes = re.sub(r"\s+", " ", shapes).strip().replace(" />", "/>").replace("> <", "><")
    return f'<symbol id="{name}" viewBox="0 0 24 24" fill="none" {STROKE}>{shapes}</symbol>'


if __name__ == "__main__":
    main(Path(sys.argv[1]))
