"""Resources of the API. Times are RFC 3339 in UTC; units are part of the names."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from paceline_server.api.condition import JobCondition, RankCondition
from paceline_server.api.examples import EXAMPLES
from paceline_server.policy import policy_schema

# Checked by `parse_policy`, whose messages are the same for files, flags and requests.
PolicyValues = Annotated[dict[str, Any], WithJsonSchema(policy_schema())]
# Checked by `create_job`, whose message is clearer than that of a pattern.
Text = Annotated[str, Field(json_schema_extra={"pattern": "^[^\0]*$"})]


def _add_example(schema: dict[str, Any], model: type[BaseModel]) -> None:
    if model.__name__ in EXAMPLES:
        schema["examples"] = [EXAMPLES[model.__name__]]


class Resource(BaseModel):
    model_config = ConfigDict(extra="forbid", from_attributes=True, json_schema_extra=_add_example)


class TopologyModel(Resource):
    dp: int = Field(ge=1, le=65536, examples=[2])
    pp: int = Field(ge=1, le=1024, examples=[2])
    tp: int = Field(ge=1, le=1024, examples=[2])
    cp: int = Field(1, ge=1, le=1024)
    ep: int = Field(1, ge=1, le=1024)


class JobTopology(TopologyModel):
    """The sizes of the parallel axes, and how ranks are numbered over them.

    `layout`: the axes, the outermost first. `numbers`: for ranks that no order of axes describes,
    by rank, the number that its coordinates would have in `layout`; otherwise empty.
    """

    layout: list[Literal["dp", "pp", "tp", "cp", "ep"]] = ["pp", "dp", "ep", "cp", "tp"]
    numbers: list[int] = []


class JobCreate(Resource):
    name: Text = Field(min_length=1, max_length=200, examples=["gpt-7b"])
    argv: list[Text] = Field(min_length=1, examples=[["python", "-m", "paceline_trainer"]])
    topology: TopologyModel
    # Shorthand for the same fields of `policy`.
    mode: Literal["default", "observe", "dry-run", "approve", "auto"] | None = None
    start_timeout_seconds: float | None = Field(None, ge=1, le=86_400)
    policy: PolicyValues = Field({}, description="Fields that override the server's policy.")
    environment: dict[Text, Text] = {}
    directory: Text | None = None
    checkpoint_directory: Text | None = None
    metadata: dict[Text, Text] = {}


class Verdict(Resource):
    """The state of a job in one sentence."""

    kind: str = Field(examples=["straggler"])  # healthy, starting, ... or the kind of a finding
    text: str = Field(examples=["Rank 2 (node-1) is 2.5x slower: thermal throttle."])
    incident_id: str | None = None
    # The verdict is based on data up to this time. Null: it no longer changes.
    as_of: datetime | None = None
    lag_seconds: float | None = None
    is_outdated: bool = False  # the analysis is too far behind to trust the verdict


class LedgerModel(Resource):
    """The job's wall time; see docs/efficiency.md. The parts sum to `wall_seconds`."""

    wall_seconds: float
    compute_seconds: float  # at the pace of the peers
    communication_seconds: float  # exposed transfers, without waits
    bubble_seconds: float  # idle time that the schedule has
    # lost to ranks reported as stragglers, by themselves and by those that wait for them
    straggler_seconds: float
    # lost in the same way to ranks that take longer than their peers but are not reported
    imbalance_seconds: float = 0.0
    slow_link_seconds: float = 0.0  # lost to slow links, in transfers and waits for them
    peer_wait_seconds: float  # lost: other waits for the last rank of a collective or transfer
    bubble_excess_seconds: float  # lost: idle time beyond the schedule
    data_wait_seconds: float
    optimizer_seconds: float
    evaluation_seconds: float = 0.0  # within steps, without waits for other ranks
    checkpoint_seconds: float
    lost_seconds: float
    restart_seconds: float
    startup_seconds: float
    idle_seconds: float
    # time that the same steps need on healthy peers over wall time
    goodput_ratio: float | None
    # time of the steps that count, without their checkpoints, over wall time
    ettr_ratio: float | None = None
    useful_steps: int
    lost_steps: int
    samples: int | None  # sum over the useful steps; null: not counted
    tokens: int | None


class MemoryModel(Resource):
    """The memory of the rank that uses most, as measured last. Null: not measured."""

    rank: int
    parameters_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None  # state of the optimizers
    activations_bytes: int | None  # rest of the peak
    allocated_bytes: int | None  # on the device, at the end of a step
    reserved_bytes: int | None
    peak_bytes: int | None  # most allocated
    fragmentation_ratio: float | None
    after_forward_bytes: int | None
    after_backward_bytes: int | None
    after_optimizer_bytes: int | None


class ScalingModel(Resource):
    """Throughput per rank over that of the smallest earlier run of the same name."""

    efficiency_ratio: float
    ranks: int
    base_ranks: int
    base_job_id: str
    compared: Literal["tokens_per_second", "samples_per_second"]


class RankEfficiencyModel(Resource):
    """The communication of one rank over the recent steps, as shares of its step time."""

    rank: int
    exposed_communication_ratio: float
    overlapped_communication_ratio: float
    peak_bytes: int | None  # most allocated on its device; null: not measured


class EfficiencyModel(Resource):
    """Figures of the recent steps; see docs/efficiency.md. Null: not known."""

    steps: int  # number of recent steps
    samples_per_second: float | None
    tokens_per_second: float | None
    counted_from: str | None = Field(
        examples=['samples and tokens from the "input_ids" of each batch']
    )
    model_flops_per_second: float | None  # sum over the ranks
    peak_flops_per_second: float | None  # peak of one device
    mfu_ratio: float | None
    mfu_unknown: str | None  # why the MFU is not known, and what to do
    exposed_communication_ratio: float | None  # share of the ranks' step time
    overlapped_communication_ratio: float | None
    memory: MemoryModel | None
    # by rank; of more than 64 ranks those with the least exposed communication
    ranks: list[RankEfficiencyModel]
    scaling: ScalingModel | None


class IntervalAdviceModel(Resource):
    """The best interval between two checkpoints of a job, and the figures that it follows from."""

    interval_steps: int
    interval_seconds: float
    overhead_ratio: float  # share of the time that checkpoints and repeated steps cost with it
    overhead_now_ratio: float  # with the interval of now
    checkpoint_seconds: float  # time that a checkpoint blocks the training
    mttf_seconds: float  # mean time between failures of this job
    mttf_low_seconds: float  # the interval that holds it with a probability of 90%
    mttf_high_seconds: float
    failures: int  # failures and hangs of all jobs in 90 days
    node_hours: float  # in which they were seen
    text: str


class Job(Resource):
    id: str
    name: str
    state: Literal["pending", "starting", "running", "recovering", "finished", "failed", "stopped"]
    generation: int
    restarts: int
    topology: JobTopology
    requested_topology: JobTopology
    mode: str  # in effect now; `policy` has the configured value
    # condition of its processes; `state` is what Paceline does with the job
    condition: JobCondition
    can_checkpoint: bool | None  # whether the script saves on command; null: not yet known
    checkpoint_step: int | None  # steps completed in the newest complete checkpoint
    checkpoint_path: str | None = Field(examples=["/ckpt/step-*.pt"])
    checkpoint_interval_steps: int | None  # median of the recent ones
    checkpoint_advice: IntervalAdviceModel | None  # null: a figure is not known yet
    # whether the last restart continued from the newest checkpoint; null: not restarted yet
    resumes: bool | None
    policy: PolicyValues
    policy_version: int | None = None  # null: created by an earlier release
    watched: bool  # an external job (torchrun, Slurm): acted on only by its launcher
    created_at: datetime
    started_at: datetime | None  # first step
    finished_at: datetime | None
    step: int | None  # newest step that all ranks have finished
    step_seconds: float | None
    loss: float | None
    evaluation_loss: float | None
    metadata: dict[str, str]
    unrecorded_communication: str | None  # why waits count as compute; null: they do not
    verdict: Verdict
    ledger: LedgerModel
    efficiency: EfficiencyModel
    open_incidents: int
    pending_actions: int


class Rank(Resource):
    rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    cp_rank: int = 0
    ep_rank: int = 0
    node: str
    local_rank: int
    gpu: int | None
    pid: int | None
    state: str  # assigned, started, attached, exited
    condition: RankCondition
    status: str | None  # status of the trainer: starting, running, checkpointing, ...
    step: int | None
    operation: str | None
    operation_seconds: float | None
    process_state: str | None
    exit_code: int | None
    signal: int | None


class StageBubbleModel(Resource):
    """Idle share of a stage during the pipeline phase.

    The last seven fields sum to `excess_ratio`.
    """

    stage: int
    measured_ratio: float
    theory_ratio: float | None
    excess_ratio: float | None = None
    imbalance_ratio: float | None = None
    straggler_ratio: float | None = None
    variation_ratio: float | None = None
    transfer_ratio: float | None = None
    data_ratio: float | None = None
    launch_ratio: float | None = None
    other_ratio: float | None = None


class Step(Resource):
    """One finished step; times are means over ranks."""

    generation: int
    step: int
    started_at: datetime
    duration_seconds: float
    loss: float | None
    gradient_norm: float | None
    slowest_rank: int | None
    slowest_slowdown: float | None
    compute_seconds: float
    communication_seconds: float
    wait_seconds: float
    bubble_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float
    overlapped_seconds: float = 0.0  # communication in flight while the host was not blocked in it
    samples: int | None = None  # sum over the replicas; null: not counted
    tokens: int | None = None
    skipped: int = 0  # short steps before it that were not analyzed, and for which it stands
    # lost time, contained in the times above; null: not known
    straggler_seconds: float | None = None
    imbalance_seconds: float | None = None
    slow_link_seconds: float | None = None
    peer_wait_seconds: float | None = None
    bubble_excess_seconds: float | None = None
    goodput_ratio: float | None = None  # the rest without data wait and checkpoint, over duration
    bubbles: list[StageBubbleModel]


class WhatIfVerdict(Resource):
    """The result in one sentence. Kinds: see docs/what-if.md; `unknown` without a replay."""

    kind: str = Field(examples=["slow_worker"])
    target: str | None = Field(examples=["rank 2"])
    text: str


class FixModel(Resource):
    """Gain if one part were as fast as its peers. Parts overlap: gains do not add up."""

    kind: Literal["rank", "worker", "stage", "dp_rank", "optype"]
    target: str = Field(examples=["rank 2"])
    speedup: float  # current step time over step time with the fix


class PipelineAdviceModel(Resource):
    """A simulated change of the pipeline. Ratios are relative to the current pipeline."""

    change: str
    schedule: str
    microbatches: int
    virtual_stages: int
    speedup: float  # current step time over step time with the fix
    bubble_ratio: float
    bubble_ratio_now: float
    memory_ratio: float  # activation memory of the stage with the most


class WhatIf(Resource):
    """The last steps, replayed with parts of them as fast as their peers.

    Slowdowns are relative to the ideal run; 1.0 means none. In `..._by_...` only that group keeps
    its measured times. Fields are null or empty if the steps cannot be replayed; the verdict says
    why.
    """

    job_id: str
    generation: int
    topology: JobTopology
    first_step: int | None = None
    last_step: int | None = None
    step_seconds: float | None = None  # mean of the replayed steps
    ideal_step_seconds: float | None = None
    slowdown: float | None = None
    slowdown_by_step: dict[int, float] = {}
    slowdown_by_optype: dict[str, float] = {}
    slowdown_by_dp_rank: dict[int, float] = {}
    slowdown_by_stage: dict[int, float] = {}
    slowdown_by_worker: dict[int, float] = {}  # key: lowest rank of the worker
    m_s: float | None = None  # share of the slowdown explained by the last stage
    m_w: float | None = None  # share explained by the slowest 3% of workers
    launch_slowdown: float | None = None
    slowest_workers: list[int] = []  # workers of `m_w`, slowest first
    verdict: WhatIfVerdict
    fixes: list[FixModel] = []  # largest gain first
    advice: list[PipelineAdviceModel] = []  # largest gain first


class GridCell(Resource):
    rank: int
    dp_rank: int  # includes the expert rank
    pp_rank: int
    tp_rank: int  # includes the context rank
    node: str | None
    state: str
    condition: RankCondition
    self_seconds: float | None  # median over the window
    slowdown: float | None


class Grid(Resource):
    """Slowdown per rank over the last `steps` steps of the current generation.

    The grid has three axes: its `dp` is dp x ep of the job, its `tp` is cp x tp.
    """

    job_id: str
    generation: int
    topology: JobTopology
    first_step: int | None
    last_step: int | None
    cells: list[GridCell]


class Gpu(Resource):
    index: int
    uuid: str
    name: str
    pci_bus_id: str
    # such a GPU holds no rank until it has recovered
    trouble: Literal["lost", "hung"] | None = None
    sm_clock_hertz: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_ratio: float | None = None
    throttle_reasons: list[str] = []


class Node(Resource):
    id: str  # agent_id
    hostname: str
    version: str
    state: Literal["ready", "degraded", "quarantined", "lost"]
    reason: str | None  # reason of the quarantine, or the state of failed GPUs
    slots: int  # number of ranks that fit now
    job_id: str | None  # the job that the node is assigned to
    ranks: list[int]  # ranks of that job
    ranks_by_job: dict[str, list[int]]  # includes external jobs
    gpus: list[Gpu]
    last_seen_at: datetime


class EvidenceModel(Resource):
    text: str
    metric: str | None = None
    value: float | None = None
    expected: float | None = None


class CauseModel(Resource):
    """One possible cause. Likelihoods of an incident sum to at most 1; the rest is unknown."""

    name: str
    likelihood: float
    evidence: list[EvidenceModel] = []
    counter_evidence: list[EvidenceModel] = []


class FrameModel(Resource):
    function: str
    file: str
    line: int


class ThreadModel(Resource):
    """One thread of a rank's process; frames are innermost first."""

    name: str
    holds_gil: bool
    is_running: bool
    frames: list[FrameModel]


class StacksModel(Resource):
    """Python stacks of one rank, taken during a hang or on demand."""

    rank: int
    taken_at: datetime
    threads: list[ThreadModel]
    error: str | None = None  # why they could not be taken


class RankStacks(Resource):
    """The newest stacks of a rank, and the newest request for them.

    `state` is that of the request, or `taken` for stacks of a hang; `asked` until the node
    responds.
    """

    job_id: str
    rank: int
    state: Literal["none", "asked", "taken", "failed"]
    asked_at: datetime | None = None
    received_at: datetime | None = None
    error: str | None = None
    stacks: StacksModel | None = None


class RankDumpModel(Resource):
    rank: int
    received_at: datetime
    error: str | None = None  # why there is no dump


class FlightRecorder(Resource):
    """Flight Recorder dumps of a job's ranks, and the verdict from all of them."""

    job_id: str
    generation: int
    text: str  # the verdict, or why there is none
    dumps: list[RankDumpModel]  # ranks that have responded
    report: dict[str, Any] | None = None  # same as `paceline analyze --flight-recorder --json`


class RecoveryModel(Resource):
    """The parts of a repair in seconds (docs/repair.md); null: not part of it, or not known."""

    detect_seconds: float | None = None  # from the onset to the detection
    decide_seconds: float | None = None
    approve_seconds: float | None = None  # until a person approved it
    save_seconds: float | None = None  # until a checkpoint was saved
    stop_seconds: float | None = None  # until all ranks were dead
    place_seconds: float | None = None  # wait for nodes or the backoff
    launch_seconds: float | None = None  # until the launcher of an external job ran new ranks
    start_seconds: float | None = None  # until all ranks were started
    resume_seconds: float | None = None  # until all ranks had finished a step
    total_seconds: float | None = None  # null: not recovered


class Incident(Resource):
    id: str
    job_id: str
    generation: int
    kind: str  # straggler, slow_link, stage_imbalance, bubble, hang, failure, ...
    cause: str
    state: Literal["open", "mitigating", "resolved"]
    severity: str
    urgency: float  # sort value: higher is worse, below 0 of an ended job, -1 is resolved
    summary: str
    rank: int | None
    node: str | None
    stage: int | None
    slowdown: float | None
    cost_ratio: float | None  # share of the step time that it costs
    speedup: float | None = None  # current step time over that of a replay without it
    persistence: Literal["persistent", "transient", "chronic"] | None = None
    side: Literal["host", "device", "mismatch"] | None = None  # hangs only
    ranks: list[int] = []  # all affected ranks, if more than `rank`
    link: list[int] | None = None  # slow link: source and destination rank
    onset_step: int | None
    detected_step: int | None
    opened_at: datetime | None = None  # earlier if it began as a lesser problem
    # The end of the last step before training stopped, or the start of the first slow one.
    onset_at: datetime | None = None
    detected_at: datetime  # when the problem that it describes was detected
    resolved_at: datetime | None
    recovery: RecoveryModel | None = None  # null: no restart was begun for it
    evidence: list[EvidenceModel]
    counter_evidence: list[EvidenceModel]
    causes: list[CauseModel] = []  # most likely first
    advice: str | None = None  # what to change in the training, and the gain
    stacks: list[StacksModel] = []  # hangs only; only in GET of one incident
    symptoms: list[str]  # summaries of the findings grouped into it
    action_ids: list[str]


class PhaseModel(Resource):
    name: str
    started_at: datetime
    detail: str


class WorthModel(Resource):
    """The expected gain and cost of a planned restart, and the figures that they follow from.

    In mode auto it is carried out once the gain exceeds the cost (docs/repair.md).
    """

    gain_seconds: float
    cost_seconds: float
    is_positive: bool  # the gain exceeds the cost
    slow_ratio: float  # share of the step time that the fault costs
    slow_seconds: float  # how long it is expected to last after the restart would begin
    lasted_seconds: float  # so far
    remaining_seconds: float  # rest of the training
    is_remaining_known: bool  # reported by the script; else assumed
    kept_ratio: float  # ranks after the restart over ranks now
    wait_seconds: float  # for the script's own checkpoint
    pause_seconds: float
    is_pause_measured: bool
    repeated_steps: int
    repeated_seconds: float
    failure_probability: float


class Action(Resource):
    id: str
    job_id: str
    incident_id: str | None
    kind: str  # start, checkpoint, restart, stop, quarantine, notify
    state: Literal["proposed", "approved", "running", "done", "failed", "rejected", "superseded"]
    reason: str
    generation: int
    exclude_nodes: list[str]
    created_at: datetime
    finished_at: datetime | None
    phases: list[PhaseModel]
    can_be_rejected: bool  # proposed, or waiting for the script's own checkpoint
    # The steps that a proposal would repeat, and about how long they take.
    price_steps: int | None
    price_seconds: float | None
    worth: WorthModel | None  # restarts for a slowdown only
    lost_steps: int | None
    resumed_step: int | None
    decided_by: str | None = None  # who approved, rejected or requested it
    policy_version: int | None = None  # by which it was decided last
    error: str | None


class QuantilesModel(Resource):
    """Quantiles of `count` values by nearest rank: each one is a value that occurred."""

    count: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float


class RecoveryGroup(Resource):
    """Recoveries from incidents of one kind through one launcher, in one week or in all."""

    kind: str
    launcher: str  # paceline: started by its agents
    week: date | None  # its Monday, UTC; null: all weeks
    count: int
    parts: dict[str, QuantilesModel]  # fields of `RecoveryModel` without `_seconds`


class RecoveryReport(Resource):
    since: datetime
    is_complete: bool  # false: only the newest recoveries were counted
    groups: list[RecoveryGroup]


class PolicyChangeModel(Resource):
    field: str
    before: str
    after: str


class PolicyVersion(Resource):
    """One version of a policy, with what it changed."""

    version: int
    hash: str  # SHA-256 of all values
    job_id: str | None  # null: the default for new jobs
    at: datetime
    actor: str
    comment: str
    values: PolicyValues
    changes: list[PolicyChangeModel]


class PolicyUpdate(Resource):
    """Fields of a policy to change (docs/policy.md)."""

    values: PolicyValues
    comment: str = ""


class AuditRecord(Resource):
    id: int
    at: datetime
    job_id: str | None
    actor: str
    verb: str
    subject: str
    detail: str


class ActionDecision(Resource):
    """Body of approve and reject."""

    comment: str = ""


class RestartRequest(Resource):
    """Body of a restart request."""

    exclude_nodes: list[str] = Field(
        default=[],
        max_length=1000,
        description="Nodes of the job that it must not use again; they are quarantined.",
    )
    checkpoint: bool = Field(
        default=True,
        description="Save a checkpoint first. With false, the ranks are stopped at once, and the "
        "steps since the newest checkpoint are repeated.",
    )
    comment: str = Field(default="", max_length=1000, description="Why; shown with the action.")


class BurstRequest(Resource):
    """Body of a burst request: which collectors (none: all), and for how long."""

    collectors: list[str] = []
    seconds: float = Field(default=10.0, gt=0, le=30)


class IngestAnswer(Resource):
    status: Literal["stored", "duplicate"]
    sequence: int


class Page(Resource):
    """A page of a list; `next_cursor` is opaque, None at the end."""

    next_cursor: str | None = None


class JobPage(Page):
    items: list[Job]


class RankPage(Page):
    items: list[Rank]


class StepPage(Page):
    items: list[Step]


class NodePage(Page):
    items: list[Node]


class IncidentPage(Page):
    items: list[Incident]


class ActionPage(Page):
    items: list[Action]


class PolicyPage(Page):
    items: list[PolicyVersion]


class AuditPage(Page):
    items: list[AuditRecord]


class CallerModel(Resource):
    """The caller of a request, as identified by the server."""

    name: str
    can_change: bool


class LoginLink(Resource):
    """A link that signs in one browser, once; the path is relative to the server's URL."""

    path: str
    expires_at: datetime


class Problem(Resource):
    """Problem details (RFC 9457)."""

    type: str = Field(examples=["about:blank"])
    title: str
    status: int
    detail: str
    instance: str | None = None
