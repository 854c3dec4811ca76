"""Runs a cell of a page in the reader's browser, after the earlier cells it needs.

Every run starts from nothing: the cells that give what this one uses are run first, in
the page's order and as the reader left them, so that no result depends on what was
clicked before. A cell gives the names that it binds at its top level, and those whose
objects it changes in place (`X[0] = row`, `X.append(row)`). What a function does to an
object that is handed to it is not seen.
"""

import ast
import contextlib
import dis
import io
import json
import linecache
import sys
import traceback
from collections.abc import Callable
from types import CodeType

LIBRARY = "transformer_lib"
LONGEST = 20_000  # characters that one run may print
DEEPEST = 6  # calls that a traceback shows


# --- which cells a cell needs ---------------------------------------------------------


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Names that a cell takes from outside, and names that it gives.

    The compiler knows what is local to a function, so its code is read. A cell that
    is no Python takes and gives nothing.
    """
    try:
        tree = ast.parse(text)
        code = compile(tree, "cell", "exec")
    except (SyntaxError, ValueError):
        return set(), set()
    takes, binds = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            binds.add(step.argval)
        elif loads_global(step) and step.argval not in binds:
            takes.add(step.argval)
    for inner in inner_codes(code):  # runs later, when all of the cell is bound
        loaded = {s.argval for s in dis.get_instructions(inner) if loads_global(s)}
        takes |= loaded - binds
    return takes, binds | changed_in_place(tree)


def loads_global(step: dis.Instruction) -> bool:
    """Whether an instruction looks a name up that no function holds."""
    name = step.opname
    return name.startswith("LOAD") and name.endswith(("_NAME", "_GLOBAL", "_GLOBALS"))


def inner_codes(code: CodeType):
    """The functions, classes and comprehensions inside some code, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from inner_codes(constant)


def changed_in_place(tree: ast.AST) -> set[str]:
    """Names whose objects get an item or attribute, or a method called for effect."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                pass
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                node = method
            case _:
                continue
        while isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name):
            found.add(node.id)
    return found


def needed(cells: list[str], at: int) -> list[int]:
    """The earlier cells that the cell `at` needs, and those that they need."""
    known = [names_of(text) for text in cells[: at + 1]]
    wanted, chosen = set(known[at][0]), set()
    while True:
        more = {i for i in range(at) if known[i][1] & wanted} - chosen
        if not more:
            return sorted(chosen)
        chosen |= more
        wanted = wanted.union(*(known[i][0] for i in more))


# --- running --------------------------------------------------------------------------


class TooMuch(BaseException):
    """A run prints without end; no `except Exception` of the reader's catches it."""


class Screen(io.TextIOBase):
    """Hands on what is printed, up to a limit."""

    def __init__(self, write: Callable[[str], object]):
        self.give, self.left = write, LONGEST

    def write(self, text: str) -> int:
        self.give(text[: self.left])
        self.left -= len(text)
        if self.left < 0:
            raise TooMuch
        return len(text)


def name_of(at: int) -> str:
    """What tracebacks call a cell."""
    return f"<cell {at + 1}>"


def execute(nodes: list[ast.stmt], at: int, space: dict) -> None:
    exec(compile(ast.Module(nodes, []), name_of(at), "exec"), space)


def run_before(text: str, at: int, space: dict) -> bool:
    """Run an earlier cell, past its asserts that fail; give whether there were any."""
    failed = False
    for node in ast.parse(text, name_of(at)).body:
        try:
            execute([node], at, space)
        except AssertionError:
            failed = True
    return failed


def run(cells: list[str], at: int, write: Callable[[str], object]) -> dict:
    """Run the cell `at` and, before it, what it needs.

    Args:
        cells: the texts of all cells of the page.
        at: which of them to run.
        write: called with what the cell prints, piece by piece, and with its value.

    Returns:
        `before`, the cells that were run first; `broken`, those with an assert that
        fails, as one will when the reader changes the numbers that it is about;
        `stopped`, the cell that raised an error, and `error`, the traceback; `verdict`,
        whether an exercise's check passed. The last three are None where there is no
        such thing.
    """
    for name in [n for n in sys.modules if n.partition(".")[0] == LIBRARY]:
        del sys.modules[name]  # in case the reader has changed something in it
    for i, text in enumerate(cells[: at + 1]):
        lines = text.splitlines(keepends=True)
        linecache.cache[name_of(i)] = len(text), None, lines, name_of(i)
    result = {"before": needed(cells, at), "broken": []}
    result |= {"stopped": None, "error": None, "verdict": None}
    space = {"__name__": "__main__"}
    screen, running = Screen(write), at
    try:
        with printing_to(Screen(lambda text: None)):
            for running in result["before"]:
                if run_before(cells[running], running, space):
                    result["broken"].append(running)
        running = at
        with printing_to(screen):
            result["verdict"] = run_and_show(cells[at], at, space)
    except TooMuch:
        said = f"Stopped: a cell may print {LONGEST:,} characters here, not more."
        result |= {"stopped": running, "error": said}
    except BaseException as error:  # exit() and KeyboardInterrupt too
        result |= {"stopped": running, "error": traceback_of(error)}
    return result


def run_and_show(text: str, at: int, space: dict) -> bool | None:
    """Run a cell and print its value; give the verdict, if its value is one."""
    body = ast.parse(text, name_of(at)).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    execute(body, at, space)
    if last is None:
        return None
    expression = compile(ast.Expression(last.value), name_of(at), "eval")
    value = eval(expression, space)
    if value is not None:
        print(repr(value))
    is_verdict = type(value).__module__ == f"{LIBRARY}.exercises.check"
    return bool(value) if is_verdict else None


@contextlib.contextmanager
def printing_to(screen: Screen):
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        yield


def traceback_of(error: BaseException) -> str:
    """Python's own words about an error, from the cell's line on."""
    whole = traceback.TracebackException.from_exception(error)
    part, seen = whole, set()
    while part and id(part) not in seen:
        seen.add(id(part))
        while part.stack and not part.stack[0].filename.startswith("<cell "):
            del part.stack[0]  # a call of this module, or of one that it uses
        part.stack[:] = part.stack[-DEEPEST:]
        part = part.__cause__ or part.__context__
    told = whole.format() if whole.stack else whole.format_exception_only()
    return "".join(told)[-4_000:].rstrip()


def run_json(cells: str, at: int, write: Callable[[str], object]) -> str:
    """The same for JavaScript, which hands texts over as JSON."""
    return json.dumps(run(json.loads(cells), at, write))
