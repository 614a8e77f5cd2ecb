"""The import graph of the repository: the test files that import a module, directly or indirectly."""

import ast
from pathlib import Path

FOLDERS = ("bass_core", "bass_lab", "kernels", "tests")


class ImportGraph:
    """leave_out: stems of test files to ignore."""

    def __init__(self, tree: Path, leave_out: tuple[str, ...] = ()):
        self.tree, self.lines = tree, {}
        paths = (path for folder in FOLDERS for path in (tree / folder).rglob("*.py"))
        self.modules = {self._name(path): path for path in paths if path.stem not in leave_out}
        self.public = self._public()
        self.users: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, path in self.modules.items():
            for used in self._used(path):
                self.users[used].add(name)

    @property
    def tests(self) -> list[str]:
        return [self._path(name) for name in self.modules if name.startswith("test_")]

    def nearest(self, file: str) -> list[tuple[int, str]]:
        """Return the test files that import a file as (imports between, path), nearest and shortest first."""
        start = self._name(self.tree / file)
        distance, edge = {start: 0}, [start] if start in self.users else []
        while edge:
            following = {user for name in edge for user in self.users[name]} - distance.keys()
            distance |= dict.fromkeys(following, distance[edge[0]] + 1)
            edge = sorted(following)
        found = [(far, self._path(name)) for name, far in distance.items() if name.startswith("test_")]
        return sorted(found, key=lambda each: (each[0], self.lines.get(each[1], 0)))

    def _path(self, name: str) -> str:
        path = self.modules.get(name)
        return name if path is None else path.relative_to(self.tree).as_posix()

    def _name(self, path: Path) -> str:
        """Return the name for imports of a file. Test files and test support are imported by stem."""
        parts = path.relative_to(self.tree).with_suffix("").parts
        if parts[0] == "tests":
            return parts[-1]
        parts = parts[1:] if parts[0] == "kernels" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _public(self) -> dict[str, str]:
        tree = ast.parse((self.tree / "bass_core/__init__.py").read_text("utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        return {name.name: node.module for node in imports for name in node.names}

    def _used(self, path: Path) -> set[str]:
        text, found = path.read_text("utf-8"), set()
        self.lines[path.relative_to(self.tree).as_posix()] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
                if node.module == "bass_core":
                    found |= {self.public.get(name.name, "") for name in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bass":
                found.add(self.public.get(node.attr, ""))
        return found & self.modules.keys() - ({"bass_core"} if path.name.startswith("test_") else set())
