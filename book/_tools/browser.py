"""The browser that tests, the PDF, screenshots and benchmarks use; chosen here alone.

    python book/_tools/browser.py    # says which one is used; fetches one if need be

In this order: a Chromium or Chrome of this machine; the one that npm brings by
book/_web's lock (Linux on x86-64); the one that Playwright installs. Only the command,
which `make test` and `make pdf` run first, fetches anything.
"""

import contextlib
import functools
import http.server
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
WEB = ROOT / "_build" / "web"
PACKAGE = WEB / "node_modules" / "@sparticuz" / "chromium"
PLACE = ROOT / "_build" / "browser"
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()
HOW = "`.venv/bin/python book/_tools/browser.py` gets one, from npm or by Playwright"
# Node reads what npm packs; a reader's Python has no Brotli.
UNPACK = """const fs = require('node:fs'), zlib = require('node:zlib');
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));"""

FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{}</dir><cachedir>{}</cachedir></fontconfig>"""
FONT_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.fonts",
    "~/.local/share/fonts",
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def translate_path(self, path):
        # The page for addresses that lead nowhere knows where the book will be.
        return super().translate_path(path.removeprefix("/literate-transformer"))

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder: Path):
    """The address of a server of this folder, on this machine, while it is used."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@dataclass
class Browser:
    """An executable, where it comes from, and what its environment must hold."""

    path: str
    origin: str
    environment: dict[str, str] = field(default_factory=dict)

    def version(self) -> str | None:
        """What it calls itself; None where it does not start.

        Ubuntu's `chromium-browser`, for one, may only tell how to install a browser.
        """
        try:
            done = subprocess.run(
                [self.path, "--version"],
                capture_output=True,
                text=True,
                timeout=600,
                env={**os.environ, **self.environment},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        words = done.stdout.strip()
        return words if done.returncode == 0 and words else None

    def launch(self, playwright):
        """The browser, running, without a window."""
        return playwright.chromium.launch(
            executable_path=self.path,
            args=FLAGS,
            env={**os.environ, **self.environment},
        )


def installed() -> Browser | None:
    """A browser of this machine."""
    for name in NAMES:
        path = shutil.which(name)
        if path and Browser(path, "").version():
            return Browser(path, "of this machine")
    return None


def unpack(source: Path, target: Path) -> None:
    """One of the package's files, uncompressed; a `.tar` as a folder."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        plain = Path(folder) / "plain"
        command = ["node", "-e", UNPACK, str(source), str(plain)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        if source.name.endswith(".tar.br"):
            made = Path(folder) / "made"
            with tarfile.open(fileobj=io.BytesIO(plain.read_bytes())) as archive:
                archive.extractall(made, filter="data")
        else:
            made = plain
            made.chmod(0o755)
        # Somebody else may have been faster: theirs is the same.
        with contextlib.suppress(OSError):
            made.rename(target)


def has_fonts() -> bool:
    """Whether this system can draw letters at all; without fonts a page has no text."""
    folders = [Path(name).expanduser() for name in FONT_FOLDERS]
    return Path("/etc/fonts/fonts.conf").exists() and any(
        path.suffix in (".ttf", ".otf", ".ttc")
        for folder in folders
        for path in folder.rglob("*")
    )


def from_npm() -> Browser | None:
    """The browser of the npm package, if that was installed; unpacked when first asked.

    The package holds one file for every Linux on x86-64, and the libraries and fonts
    that a bare system lacks.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return None
    packed = PACKAGE / "bin" / "chromium.br"
    if not packed.exists():
        return None
    version = json.loads((PACKAGE / "package.json").read_text("utf-8"))["version"]
    place = PLACE / version
    chromium = place / "chromium"
    try:
        if not chromium.exists():
            place.mkdir(parents=True, exist_ok=True)
            for old in PLACE.iterdir():
                if old != place:
                    shutil.rmtree(old)
            unpack(packed, chromium)
        needed = subprocess.run(
            ["ldd", str(chromium)], capture_output=True, text=True, check=False
        )
        environment = {}
        if needed.returncode or "not found" in needed.stdout:
            libraries = place / "libraries"
            if not libraries.exists():
                unpack(PACKAGE / "bin" / "al2023.tar.br", libraries)
            path = [str(libraries / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, path))
        if not has_fonts():
            fonts = place / "fonts"
            if not fonts.exists():
                unpack(PACKAGE / "bin" / "fonts.tar.br", fonts)
            # The package's own names folders of another system.
            settings = place / "fonts.conf"
            settings.write_text(FONTS.format(fonts, place / "font-cache"), "utf-8")
            environment["FONTCONFIG_FILE"] = str(settings)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"The browser from npm could not be unpacked: {error}", file=sys.stderr)
        return None
    browser = Browser(str(chromium), "from npm", environment)
    return browser if browser.version() else None


def from_playwright() -> Browser | None:
    """The browser that Playwright installed for this user."""
    # In a process of its own: a test may have Playwright running in this one.
    script = (
        "from playwright.sync_api import sync_playwright\n"
        "with sync_playwright() as p: print(p.chromium.executable_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    browser = Browser(done.stdout.strip(), "from Playwright")
    return browser if browser.path and browser.version() else None


def find() -> Browser | None:
    """The browser to use, of those that are there; None if there is none."""
    return installed() or from_npm() or from_playwright()


def run(command: list[str]) -> bool:
    """Whether a command succeeds; its last lines where it does not."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        words = done.stdout.strip().splitlines()[-5:]
    except (OSError, subprocess.TimeoutExpired) as error:
        done, words = None, [str(error)]
    if done and done.returncode == 0:
        return True
    print(f"{' '.join(command)} failed:", *words, sep="\n  ", file=sys.stderr)
    return False


def fetch() -> Browser | None:
    """The browser to use, fetched where there is none."""
    found = find()
    if found:
        return found
    if shutil.which("npm") and not PACKAGE.exists():
        WEB.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(ROOT / "book" / "_web" / name, WEB)
        run(
            [
                "npm",
                "ci",
                "--prefix",
                str(WEB),
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
            ]
        )
        found = from_npm()
    if not found and run([sys.executable, "-m", "playwright", "install", "chromium"]):
        found = from_playwright()
    return found


def main() -> None:
    browser = fetch()
    if browser is None:
        sys.exit(
            "There is no browser here, and neither npm nor Playwright brought one "
            "that runs.\nInstall Chromium or Chrome (Debian: apt install chromium; "
            f"Ubuntu: snap install chromium).\nLooked for: {', '.join(NAMES)}."
        )
    print(f"{browser.version()} {browser.origin}: {browser.path}")


if __name__ == "__main__":
    main()
