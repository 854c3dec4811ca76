"""The part of a notebook that some of its cells need, and no more."""

import ast
import re
import symtable
from collections.abc import Callable, Iterable


def plain(source: str) -> str:
    """A cell's code, without IPython's % and ! lines."""
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)


def base(node: ast.AST) -> str | None:
    """The name that an attribute or an item is taken of."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def from_outside(table: symtable.SymbolTable) -> set[str]:
    """The global names that functions and classes of a cell read."""
    found = set()
    for inner in table.get_children():
        found |= {s.get_name() for s in inner.get_symbols() if s.is_global()}
        found |= from_outside(inner)
    return found


class Cell:
    """What a cell binds, what it changes in place, and what it reads from others."""

    def __init__(self, source: str):
        code = plain(source)
        self.binds, self.changes, self.reads = set(), set(), set()
        self.imports = set()
        for statement in ast.parse(code).body:
            self.look(statement)
        inside = from_outside(symtable.symtable(code, "cell", "exec"))
        self.reads |= inside - self.binds

    def look(self, node: ast.AST) -> None:
        """Note what happens when a piece of the cell runs, in this order."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definition(node)
        elif isinstance(node, ast.Lambda):
            pass  # from_outside knows what it reads
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports |= {(a.asname or a.name).split(".")[0] for a in node.names}
            self.binds |= self.imports
        elif isinstance(node, ast.Name):
            self.name(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.changes.add(node.target.id)
                self.reads |= {node.target.id} - self.binds
            if node.value:
                self.look(node.value)
            for target in getattr(node, "targets", None) or [node.target]:
                self.look(target)
        elif isinstance(node, ast.For):
            for part in (node.iter, node.target, *node.body, *node.orelse):
                self.look(part)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
            self.look(node.generators[0].iter)  # the rest: from_outside
        elif isinstance(node, ast.GeneratorExp):
            self.look(node.generators[0].iter)
        else:
            if isinstance(node, ast.Attribute | ast.Subscript):
                if not isinstance(node.ctx, ast.Load):
                    self.changes.add(base(node))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if isinstance(node.value.func, ast.Attribute):
                    self.changes.add(base(node.value))
            for part in ast.iter_child_nodes(node):
                self.look(part)

    def definition(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for part in node.decorator_list:
            self.look(part)
        if isinstance(node, ast.ClassDef):
            for part in node.bases:
                self.look(part)
        else:
            arguments = node.args
            named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
            named += [arguments.vararg, arguments.kwarg]
            parts = [a.annotation for a in named if a] + [node.returns]
            for part in [*arguments.defaults, *arguments.kw_defaults, *parts]:
                if part:
                    self.look(part)
            patches = any(base(part) == "patch" for part in node.decorator_list)
            if patches and arguments.args:  # nbdev adds it to the class that it names
                self.changes.add(base(arguments.args[0].annotation))
        self.binds.add(node.name)

    def name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.reads |= {node.id} - self.binds
        else:
            self.binds.add(node.id)


def needed(
    sources: list[str], wanted: Callable[[str], bool], given: Iterable[str] = ()
) -> list[int]:
    """The places of the cells that are wanted, and of those that they need.

    Args:
        sources: The code cells of a notebook, in order.
        wanted: Which of them are to run.
        given: Names that are there before the first cell.
    """
    cells = [Cell(source) for source in sources]
    modules = set().union(*(cell.imports for cell in cells))
    names, places = set(), []
    for i in reversed(range(len(cells))):
        cell = cells[i]
        if wanted(sources[i]) or names & (cell.binds | (cell.changes - modules)):
            places.append(i)
            names = (names - cell.binds) | (cell.reads - set(given))
    return places[::-1]
