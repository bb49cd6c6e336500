"""Reads `scalers.yaml` and the files of `scalers.d` into one configuration, or says everything that is wrong.

Reading is all or nothing: with one problem anywhere there is no configuration.  Files of the directory only add
scalers; everything else belongs in the main file.  Whether this machine can run what is configured is no question
here (`kici doctor` asks it).
"""

import contextlib
import dataclasses
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kici.config.advice import advice_on
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.config.nodes import Mapping, Node, Sequence
from kici.config.problems import Notice, Problem, path_text
from kici.config.problems import Path as ConfigPath
from kici.config.rules import Fault, broken_rules
from kici.config.shapes import Table, file_of_directory, table_of
from kici.config.walker import Report, TooMany, Walker, local_path
from kici.config.yaml_source import FILE_BYTES_MAX, parse
from kici.domain.ids import ScalerName
from kici.domain.platform import Host

DIRECTORY_FILES_MAX: Final = 10_000
OWN_AGENT: Final = "kici-agent"
"""The agent program of this installation: a `binaryPath` without a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What loading came to."""

    config: ScalersConfig | None
    """None exactly when there are problems."""
    problems: tuple[Problem, ...]
    """In the order of files and lines, at most `PROBLEMS_MAX` of them."""
    warnings: tuple[Notice, ...] = ()
    problems_dropped: int = 0
    """How many more were seen; beyond ten thousand nobody looks."""


def default_scalers(host: Host) -> ScalersConfig:
    """What a coordinator runs without a scalers file: processes of its own host, with labels that say what it is."""
    return ScalersConfig(
        scalers=(
            ScalerEntry(
                name=ScalerName("local"),
                type=BackendType.BARE_METAL,
                max_agents=16,
                label_sets=(LabelSet(labels=(*host.words, "local"), binary_path=OWN_AGENT),),
            ),
        )
    )


def load_scalers(main: Path | None, directory: Path | None = None) -> Loaded:
    """The configuration of a main file, a directory, or both; without either it is `default_scalers` of this host.

    Never raises for what is in the files, or for files that cannot be read: these are problems too.
    """
    if main is None and directory is None:
        return Loaded(config=default_scalers(Host(sys.platform, platform.machine())), problems=())
    loader = _Loader()
    sources = [] if main is None else [loader.read(main)]
    if directory is not None:
        sources += [loader.read(path) for path in loader.files(directory)]
    return loader.load(None if main is None else sources[0], sources if main is None else sources[1:])


def load_text(data: bytes, file: str = "scalers.yaml") -> Loaded:
    """The configuration of one main file that is already in memory."""
    loader = _Loader()
    return loader.load(loader.parse(data, file), [])


@dataclass(slots=True, eq=False)
class _Source:
    """One file."""

    file: str
    root: Node | None
    is_readable: bool
    """False: its text, or the file itself, could not be read, and a problem says so."""
    scalers_before: int = 0

    @property
    def scalers_node(self) -> Node | None:
        entry = self.root.entries.get("scalers") if isinstance(self.root, Mapping) else None
        return None if entry is None else entry.value


class _Loader:
    def __init__(self) -> None:
        self._report = Report()
        self._walker = Walker(self._report)
        self._sources: list[_Source] = []
        """Those that were loaded, in order."""
        self._fragments: list[_Source] = []
        """Those of them that come from the directory."""

    # --- files

    def files(self, directory: Path) -> list[Path]:
        """Files of the directory, by name; hidden ones are editors' business."""
        try:
            found = [
                path
                for path in directory.iterdir()
                if path.suffix in {".yaml", ".yml"} and not path.name.startswith(".") and not path.is_dir()
            ]
        except OSError as error:
            self._unreadable(str(directory), error, "a readable directory of scaler files")
            return []
        return sorted(found, key=lambda path: path.name)[:DIRECTORY_FILES_MAX]

    def read(self, path: Path) -> _Source:
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            self._unreadable(str(path), error, "a readable file")
            return _Source(str(path), None, is_readable=False)
        return self.parse(data, str(path))

    def parse(self, data: bytes, file: str) -> _Source:
        root, problems = parse(data, file)
        for problem in problems:
            self._report.add(problem)
        return _Source(file, root, is_readable=root is not None or not problems)

    def _unreadable(self, file: str, error: OSError, expected: str) -> None:
        found = (error.strerror or str(error)).lower()
        self._report.add(Problem(file=file, line=1, column=1, path="", found=found, expected=expected))

    # --- documents

    def load(self, main: _Source | None, others: list[_Source]) -> Loaded:
        config = ScalersConfig()
        with contextlib.suppress(TooMany):
            config = self._merged(main, others)
            for fault in broken_rules(config, self._report.is_sound):
                if not self._report.is_full():
                    self._report.add(self._problem(fault))
        return self._loaded(config)

    def _merged(self, main: _Source | None, others: list[_Source]) -> ScalersConfig:
        config = ScalersConfig() if main is None else self._main(main, may_lack_scalers=bool(others))
        scalers = list(config.scalers)
        for source in others:
            source.scalers_before = len(scalers)
            scalers += self._fragment(source)
        return dataclasses.replace(config, scalers=tuple(scalers))

    def _problem(self, fault: Fault) -> Problem:
        source, line, column = self._locate(fault.path)
        return Problem(
            file=source.file,
            line=line,
            column=column,
            path=path_text(local_path(fault.path, source.scalers_before)),
            found=fault.found,
            expected=fault.expected,
            hint=fault.hint,
        )

    def _loaded(self, config: ScalersConfig) -> Loaded:
        if self._report.problems:
            order = {source.file: number for number, source in enumerate(self._sources)}
            problems = sorted(
                self._report.problems, key=lambda problem: (order.get(problem.file, -1), problem.line, problem.column)
            )
            return Loaded(config=None, problems=tuple(problems), problems_dropped=self._report.dropped)
        return Loaded(config=config, problems=(), warnings=tuple(self._notices(config)))

    def _main(self, source: _Source, *, may_lack_scalers: bool) -> ScalersConfig:
        self._sources.append(source)
        if not source.is_readable:
            self._report.mark_broken(("machinePools",))
            return ScalersConfig()
        config = self._walk(source, table_of(ScalersConfig))
        assert isinstance(config, ScalersConfig)
        if isinstance(source.root, Mapping) and source.scalers_node is None and not may_lack_scalers:
            self._report.add(
                Problem(
                    file=source.file,
                    line=source.root.line,
                    column=source.root.column,
                    path="scalers",
                    found="nothing",
                    expected="a list of scalers",
                    hint="scalers: [] scales nothing; files of a scalers directory may supply them too",
                )
            )
        return config

    def _fragment(self, source: _Source) -> tuple[ScalerEntry, ...]:
        self._sources.append(source)
        self._fragments.append(source)
        if not source.is_readable or source.root is None:
            return ()
        part = self._walk(source, file_of_directory())
        assert isinstance(part, ScalersConfig)
        return part.scalers

    def _walk(self, source: _Source, table: Table) -> object:
        if source.root is None:
            source.root = Mapping(1, 1)
        return self._walker.read(table, source.root, file=source.file, scalers_before=source.scalers_before)

    # --- places

    def _locate(self, path: ConfigPath) -> tuple[_Source, int, int]:
        """The file of a path among all scalers, and the deepest place in it that exists."""
        source = self._source_of(path)
        node = source.root
        assert node is not None, path
        line, column = node.line, node.column
        for step in local_path(path, source.scalers_before):
            if isinstance(node, Mapping) and step in node.entries:
                node = node.entries[str(step)].value
            elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
                node = node.items[step]
            else:
                break
            line, column = node.line, node.column
        return source, line, column

    def _source_of(self, path: ConfigPath) -> _Source:
        if len(path) < 2 or path[0] != "scalers":
            return self._sources[0]
        index = path[1]
        assert isinstance(index, int), path
        return next(
            source
            for source in reversed(self._sources)
            if source.scalers_before <= index
            and isinstance(source.scalers_node, Sequence)
            and source.scalers_node.items
        )

    # --- advice

    def _notices(self, config: ScalersConfig) -> Iterator[Notice]:
        for source in self._fragments:
            if source.scalers_node is None:
                yield Notice(file=source.file, line=1, column=1, path="", text="this file has no scalers")
        for advice in advice_on(config, self._written):
            source, line, column = self._locate(advice.path)
            shown = path_text(local_path(advice.path, source.scalers_before))
            yield Notice(file=source.file, line=line, column=column, path=shown, text=advice.text)

    def _written(self, path: ConfigPath) -> frozenset[str]:
        source = self._source_of(path)
        node = source.root
        for step in local_path(path, source.scalers_before):
            if isinstance(node, Mapping) and step in node.entries:
                node = node.entries[str(step)].value
            elif isinstance(node, Sequence) and isinstance(step, int):
                node = node.items[step]
        return frozenset(node.entries) if isinstance(node, Mapping) else frozenset()
