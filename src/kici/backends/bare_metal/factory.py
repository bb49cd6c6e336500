"""From a configuration entry to a backend, and what this host lacks for it."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.config.model import LabelSet, ScalerEntry
from kici.decide.launch import LaunchHost, ProcessSet, batch_refusal, program_argv
from kici.kit.supervise import Supervisor
from kici.ports.backend import OnExit


def settings_of(entry: ScalerEntry, data_dir: Path) -> BareMetalSettings:
    return BareMetalSettings(
        scaler=entry.name,
        max_agents=entry.max_agents,
        sets=tuple(process_set(label_set) for label_set in entry.label_sets),
        enforce_cgroups=entry.enforce_cgroups,
        data_dir=data_dir.resolve(),  # part of every mark: one spelling, however it was given
    )


def process_set(label_set: LabelSet) -> ProcessSet:
    mode = label_set.backpressure_mode
    return ProcessSet(
        labels=label_set.labels,
        binary_path=label_set.binary_path,
        env=label_set.env,
        backpressure_mode=None if mode is None else mode.value,
        image=label_set.image,
    )


def make_backend(
    entry: ScalerEntry, *, data_dir: Path, host: LaunchHost, tools: Tools, supervisor: Supervisor, on_exit: OnExit
) -> BareMetalBackend:
    settings = settings_of(entry, data_dir)
    return BareMetalBackend(settings=settings, host=host, tools=tools, supervisor=supervisor, on_exit=on_exit)


def readiness_problems(entry: ScalerEntry, host: LaunchHost) -> list[str]:
    """What this host lacks to run the entry's agents: a sentence each, with scaler and label set.

    Not part of the configuration's validity, which no machine decides.
    """
    problems = []
    for label_set in entry.label_sets:
        where = f"scaler {entry.name}, label set [{', '.join(label_set.labels)}]"
        problems += [f"{where}: {fault}" for fault in _set_problems(label_set, host)]
    return problems


def _set_problems(label_set: LabelSet, host: LaunchHost) -> list[str]:
    path = label_set.binary_path
    if path is None:
        return []
    refusal = batch_refusal(path, host.system)
    if refusal is not None:
        return [refusal]
    program = program_argv(host, path, mark="")[0]
    faults = []
    if shutil.which(program) is None:
        fault = "is not executable for us" if Path(program).exists() else "is not there"
        faults.append(f"binaryPath {path}: {program} {fault}; install it or mend the path")
    if _asks_for_sandbox(label_set.env, host) and shutil.which("bwrap") is None:
        faults.append("KICI_SANDBOX needs bwrap on the path; install bubblewrap")
    return faults


def _asks_for_sandbox(env: Mapping[str, str], host: LaunchHost) -> bool:
    wanted = env.get("KICI_SANDBOX", host.environment.get("KICI_AGENT_ENV_KICI_SANDBOX"))
    return host.system == "linux" and wanted == "true"
