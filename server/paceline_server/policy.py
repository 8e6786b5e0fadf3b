"""The values that an operator may change: when Paceline reports, when it acts, and how often.

Every value is defined here once, with its limits, its default and the reason for it;
docs/policy.md has them as a table. A job gets its policy when it is created: the values of the
request override those of the server's policy file, which override the defaults.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from paceline_server.policy_windows import WindowError, check_window

Mode = Literal["default", "observe", "dry-run", "approve", "auto"]
Resumes = Literal["seen", "yes", "no"]
Rollback = Literal["off", "propose", "auto"]
CheckpointIntervals = Literal["script", "advised"]

_DAY_SECONDS = 86_400


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of one job. Use `parse_policy` for values that come from outside."""

    mode: Annotated[
        Mode,
        Meta(
            description="Who decides on repairs. observe: only incidents are reported; dry-run: "
            "says what it would do; approve: a person approves each restart; auto: Paceline; "
            "default: auto if the script can save a checkpoint on command or is known to resume "
            "from its own, else approve. In every mode, a job that makes progress is stopped "
            "without a checkpoint only after a person has approved it, or has set `loss_rollback` "
            "to auto."
        ),
    ] = "default"
    resumes: Annotated[
        Resumes,
        Meta(
            description="Whether the script, started again by the same command, continues from its "
            "newest checkpoint. seen: once a restart has shown it; yes: without proof; no: never "
            "assumed. It matters for scripts that save checkpoints, but not on command: a planned "
            "restart of one that resumes waits for its next checkpoint; others need a person."
        ),
    ] = "seen"
    checkpoint_interval: Annotated[
        CheckpointIntervals,
        Meta(
            description="Who decides how often a script saves that uses `paceline.Checkpoints` "
            "without `every`. script: every 10 minutes; advised: at the interval that costs least "
            "with the cost of its checkpoints and the failures of the fleet, of 1 minute to 1 hour."
        ),
    ] = "script"
    restarts_per_hour: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="More restarts than this end the job: its problem is not being repaired.",
        ),
    ] = 10
    restarts_per_day: Annotated[
        int, Meta(ge=0, le=10_000, description="The same over a day, for slow cycles of failures.")
    ] = 50
    backoff_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=_DAY_SECONDS,
            description="Pause before a restart that follows one without progress; doubled each "
            "time. After progress there is none.",
        ),
    ] = 1.0
    backoff_maximum_seconds: Annotated[
        float, Meta(ge=0, le=_DAY_SECONDS, description="Upper limit of that pause.")
    ] = 300.0
    cycles_without_progress: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Restarts in a row without a new step, after which the job is ended.",
        ),
    ] = 3
    quarantine_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Largest share of the nodes that may be quarantined, of those that "
            "respond; one always may, unless it is 0. It limits what a wrong verdict can cost.",
        ),
    ] = 0.34
    maintenance_windows: Annotated[
        tuple[str, ...],
        Meta(
            description="While people work on the cluster, such as `Sat 22:00-06:00 "
            "Europe/Berlin`: nothing is restarted without the approval of a person, because a node "
            "that ends then is no failure. What was proposed is carried out after it."
        ),
    ] = ()
    planned_restart_windows: Annotated[
        tuple[str, ...],
        Meta(
            description="If given, planned restarts begin by themselves only in these windows. "
            "Crashes and hangs are repaired at any time."
        ),
    ] = ()
    approvers: Annotated[
        tuple[str, ...],
        Meta(
            description="Names of the tokens that may approve or reject actions of the job, "
            "request a restart and change its policy. None: every token of scope operator."
        ),
    ] = ()
    node_lease_seconds: Annotated[
        float,
        Meta(
            ge=5,
            le=_DAY_SECONDS,
            description="A node silent for longer counts as lost. Agents report every 0.5 s, those "
            "of very large jobs every 2.5 s. Keep it far below the agents' own --lease-seconds "
            "(docs/adr/0003).",
        ),
    ] = 5.0
    hang_patience_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=_DAY_SECONDS,
            description="How long a hang of running processes waits before a restart, which costs "
            "more than waiting for a link that flaps or storage that stalls. Four times as long "
            "after each restart that led to no new step: the script may pause there by design. "
            "Stopped or dead processes do not wait.",
        ),
    ] = 10.0
    checkpoint_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=_DAY_SECONDS,
            description="Time for all ranks to save before a planned restart; then the restart is "
            "called off and proposed to a person.",
        ),
    ] = 60.0
    stop_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=_DAY_SECONDS,
            description="Time for an agent to confirm that its ranks are dead; then it is asked "
            "again, and its node is left out.",
        ),
    ] = 15.0
    start_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=_DAY_SECONDS,
            description="Time for the first step of all ranks. A large job loads its checkpoint, "
            "compiles and sets up NCCL for minutes; a rank that exits is noticed at once.",
        ),
    ] = 900.0
    late_rank_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=_DAY_SECONDS,
            description="Ranks that wait for one that has not called `init_process_group` are "
            "reported after this, as a warning; first imports from a cold file system differ by "
            "tens of seconds. After `start_timeout_seconds` the job is hung.",
        ),
    ] = 60.0
    hang_after_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=_DAY_SECONDS,
            description="A job without progress of any rank for longer is reported as hung, "
            "unless the blocking operation usually takes more than a third of that time, or a step "
            "more than half of it (then two steps, at most 20 s). Where ranks wait for CPUs, it "
            "takes longer in proportion. 2.4 s is reported within 3 s: agents read the state pages "
            "every 0.5 s.",
        ),
    ] = 2.4
    hang_checkpoint_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=_DAY_SECONDS,
            description="The same while a rank saves a checkpoint: slow shared storage blocks "
            "every rank at once.",
        ),
    ] = 60.0
    hang_evaluation_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=_DAY_SECONDS,
            description="A blocking rank that sleeps in code of the script that records nothing, "
            "as during an upload, is reported for information until then. During evaluation "
            "nothing is reported before.",
        ),
    ] = 60.0
    hang_busy_seconds: Annotated[
        float,
        Meta(
            ge=2,
            le=_DAY_SECONDS,
            description="The same while the blocking rank uses a CPU or evaluates, or no rank "
            "waits for another: the script may evaluate or prepare data in code that records "
            "nothing. A pause of all ranks is reported for information after 20 s.",
        ),
    ] = 120.0
    gpu_hung_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=_DAY_SECONDS,
            description="A GPU that does not answer its driver for longer is reported as hung. "
            "Drivers are sometimes busy for seconds.",
        ),
    ] = 10.0
    straggler_slowdown: Annotated[
        float,
        Meta(
            gt=1,
            le=100,
            description="Mildest lasting slowdown of a rank that is reported. Real faults of 10% "
            "measure 7% to 13% in their first five steps; less is as often the room's temperature.",
        ),
    ] = 1.06
    straggler_critical_slowdown: Annotated[
        float,
        Meta(
            gt=1,
            le=100,
            description="From this slowdown on a straggler is critical: at 1.5 a third of the "
            "job's GPU time is lost.",
        ),
    ] = 1.5
    notable_cost_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="A slowdown that costs a smaller share of the step time is information: it "
            "is shown and causes no alert and no repair. A restart costs more than a day of 1%.",
        ),
    ] = 0.015
    loss_spike_deviations: Annotated[
        float,
        Meta(
            ge=3,
            le=1000,
            description="A loss that is more robust deviations (1.4826 MAD) above the median of "
            "the job's last ones is a spike. It is shown, and causes no alert.",
        ),
    ] = 10.0
    loss_divergence_steps: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="A spike that has not returned after so many steps is a divergence.",
        ),
    ] = 50
    loss_rollback: Annotated[
        Rollback,
        Meta(
            description="What follows a divergence: off: it is reported; propose: going back to a "
            "checkpoint before it is proposed to a person; auto: done in mode auto. A NaN or "
            "infinite loss is repaired as the mode says, because all later steps are useless."
        ),
    ] = "propose"
    loss_skip_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="After going back, the data of so many steps is left out, from the last "
            "step with a usual loss. 0: none.",
        ),
    ] = 0
    loss_tries: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="So often the job goes back for one place in the training; after that, a "
            "divergence is only reported, and a NaN ends the job in mode auto.",
        ),
    ] = 2
    slow_link_slowdown: Annotated[
        float,
        Meta(
            gt=1,
            le=100,
            description="Mildest lasting slowdown of a link that is reported, if it costs at least "
            "2% of step time. Transfers are short, and their jitter is large.",
        ),
    ] = 1.1


def does_resume(policy: Policy, has_resumed: bool | None) -> bool:
    """Return whether the script counts as one that resumes from its own checkpoints.

    Args:
        policy: of the job.
        has_resumed: whether its last restart continued from the newest one; None: not known.
    """
    return policy.resumes == "yes" or (policy.resumes == "seen" and has_resumed is True)


def mode_in_effect(
    policy: Policy,
    can_checkpoint: bool | None,
    has_resumed: bool | None,
    highest_step: int | None,
) -> Mode:
    """Return the mode in effect for a job; never "default".

    Before its first step a job has nothing to lose, so `default` means `auto`.
    """
    if policy.mode != "default":
        return policy.mode
    is_safe = can_checkpoint or does_resume(policy, has_resumed) or highest_step is None
    return "auto" if is_safe else "approve"


class PolicyError(ValueError):
    """Values that are not valid for the policy.

    The message says for each what was expected and found, and how to fix it.
    """


class PolicyField(NamedTuple):
    """One field of the policy, for documents and messages."""

    name: str
    expected: str
    unit: str
    default: object
    description: str


class PolicyChange(NamedTuple):
    """One field that differs between two policies."""

    field: str
    before: object
    after: object


def parse_policy(values: Mapping[str, object], base: Policy | None = None) -> Policy:
    """Return `base` (default: the defaults) with `values` replaced.

    Numbers may be given as text, as on a command line, and lists as text with commas. Raises
    PolicyError, which names all values that are not valid.
    """
    hints = get_type_hints(Policy, include_extras=True)
    found: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        try:
            found[name] = _value(name, value, hints)
        except PolicyError as error:
            problems.append(str(error))
    if not problems:
        policy = msgspec.structs.replace(base or Policy(), **found)
        problems = list(_contradictions(policy))
    if problems:
        raise PolicyError("; ".join(problems))
    return policy


def _value(name: str, value: object, hints: Mapping[str, Any]) -> Any:
    if name not in hints:
        near = difflib.get_close_matches(name, hints, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise PolicyError(f"{name} is not a policy field{hint}; expected one of {', '.join(hints)}")
    if _is_list(hints[name]) and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        parsed = msgspec.convert(value, hints[name], strict=False)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{name}: expected {_expected(hints[name])}, got {value!r}") from error
    if name.endswith("_windows"):
        for text in parsed:
            try:
                check_window(text)
            except WindowError as error:
                raise PolicyError(f"{name}: {text!r} is not a window: {error}") from error
    return parsed


def _contradictions(policy: Policy) -> Iterator[str]:
    """Yield a message for each pair of values that contradict each other."""
    for lower, upper in (
        ("backoff_seconds", "backoff_maximum_seconds"),
        ("straggler_slowdown", "straggler_critical_slowdown"),
    ):
        least, found = getattr(policy, lower), getattr(policy, upper)
        if found < least:
            yield (
                f"{upper}: expected at least {lower} ({least:g}), got {found:g}; raise {upper} or "
                f"lower {lower}"
            )


def policy_changes(before: Policy, after: Policy) -> list[PolicyChange]:
    """Return the fields that differ, in order."""
    pairs = (
        (name, getattr(before, name), getattr(after, name)) for name in Policy.__struct_fields__
    )
    return [PolicyChange(name, old, new) for name, old, new in pairs if old != new]


def policy_hash(policy: Policy) -> str:
    """Return the SHA-256 of all values, in hexadecimal: equal policies have equal hashes."""
    return hashlib.sha256(msgspec.json.encode(policy, order="sorted")).hexdigest()


def policy_fields() -> list[PolicyField]:
    """Return all fields in order."""
    hints = get_type_hints(Policy, include_extras=True)
    default = Policy()
    return [
        PolicyField(
            name,
            _expected(hint),
            _unit(name),
            getattr(default, name),
            _meta(hint).description or "",
        )
        for name, hint in hints.items()
    ]


def policy_table() -> str:
    """Return the table of docs/policy.md."""
    lines = ["| field | default | unit | value | meaning and reason |", "|---|---|---|---|---|"]
    lines += [
        f"| `{field.name}` | {_default_text(field.default)} | {field.unit} | {field.expected} | "
        f"{field.description} |"
        for field in policy_fields()
    ]
    return "\n".join(lines)


def _default_text(default: object) -> str:
    return "none" if default == () else f"`{default}`"


def policy_schema() -> dict[str, Any]:
    """Return the JSON schema of a policy, for the description of the API."""
    (_,), components = msgspec.json.schema_components([Policy], ref_template="#/{name}")
    return {**components["Policy"], "additionalProperties": False}


def _unit(name: str) -> str:
    """Return the unit that the field's name ends with."""
    units = {
        "_seconds": "s",
        "_per_hour": "1/h",
        "_per_day": "1/day",
        "_share": "ratio",
        "_slowdown": "ratio",
    }
    return next((unit for suffix, unit in units.items() if name.endswith(suffix)), "")


def _meta(hint: Any) -> Meta:
    """Return the limits and the description of a field; empty if it has none."""
    if get_origin(hint) is not Annotated:
        return Meta()
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Meta)), Meta())


def _is_list(hint: Any) -> bool:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_origin(kind) is tuple


def _expected(hint: Any) -> str:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if _is_list(hint):
        return "a list of texts"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    meta = _meta(hint)
    noun = "a whole number" if kind is int else "a number"
    if meta.gt is not None:
        lower = f" above {meta.gt:g}"
    else:
        lower = "" if meta.ge is None else f" of at least {meta.ge:g}"
    upper = "" if meta.le is None else f"{' and' if lower else ' of'} at most {meta.le:g}"
    return f"{noun}{lower}{upper}"
