"""Thresholds of the detectors. Every default says why it is what it is."""

from __future__ import annotations

import msgspec


class DetectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen; built once by the server and handed to `Engine`."""

    # Allocators, caches, JIT and page faults make the first steps of a generation slow, unevenly.
    warmup_steps: int = 3

    # The mildest lasting slowdown that is told. Real faults of 10% measure 7-13% in their first
    # five steps; what differs by less is as often the room's temperature as a fault.
    straggler_slowdown: float = 1.06
    # Expected per step of healthy, normal noise over all ranks. A hundredth of what is allowed (one
    # in 10,000 steps): tails are heavier than normal, and the scatter itself is only estimated.
    straggler_false_alarms: float = 1e-6
    # What a rank may lose little by little before it is told: GPUs of one node drift apart by a few
    # percent as it gets warm, whole nodes by more ...
    creep_slowdown: float = 1.08
    # ... and two nodes whose drifts are opposite by up to a tenth.
    creep_slowdown_of_node: float = 1.2
    # Mild and constant differences between peers are the model's (an extra embedding, the logging
    # rank), not a fault: from here on they are worth advice ...
    chronic_slowdown: float = 1.15
    # ... after this many steps, for they do not run away.
    chronic_steps: int = 40
    # No model makes one of several peers this much slower: a GPU that was sick before the job
    # began. Believed after so many steps.
    chronic_fault: float = 1.4
    chronic_fault_steps: int = 6
    # One other may itself be the odd one: below two, what was so from the start is advice only.
    chronic_peers: int = 2
    # A link counts as slow when its transfers, once both ends are ready, take this many times what
    # they took before ...
    link_slowdown: float = 1.1
    # ... and that is this share of a step: transfers are short, and their jitter is large.
    link_cost: float = 0.02
    # A rank stuck for a moment is worth a note from this share of a step on, when that is so many
    # times the worst of the steps before: heavy tails are the host's, not news.
    stall_share: float = 0.2
    stall_over_worst: float = 1.25
    # The note goes when the rank was not stuck again for so many steps: time to be seen.
    stall_told_steps: int = 50
    # If more of the ranks are stuck at once, it is what they share.
    stall_ranks: float = 0.25
    # Steps of the past that make a baseline; at 10 the error of its median is a third of a step's.
    baseline_steps: int = 10
    # From this slowdown on every second GPU hour of the job is lost: critical.
    straggler_critical: float = 1.5

    # A rank's data wait counts when it takes this share of the step more than is normal: a stall
    # that makes steps a tenth longer is 9% of them, and jitter of the wait itself far less ...
    data_wait_share: float = 0.06
    # ... and is this many times what its peers wait, and what it waited itself before ...
    data_wait_ratio: float = 3.0
    # ... in this many of the last so many steps: an epoch's end or a cold cache is shorter.
    data_wait_window: int = 5
    data_wait_hits: int = 4
    # One that comes and goes (every n-th file is on a slow disk) must come so often in so many
    # steps, and cost this much of all of them: rare long reads are every storage's.
    data_wait_recurring_window: int = 32
    data_wait_recurring_hits: int = 4
    data_wait_recurring_share: float = 0.03

    # A stage this much slower than the mean of all is uneven. A loss on the last stage and chips
    # that differ by a percent or two make 1.05.
    imbalance_ratio: float = 1.06
    # Even stages must give this much: less is not worth dividing the model anew.
    imbalance_gain: float = 1.06
    imbalance_steps: int = 12  # that say how the model was divided ...
    imbalance_least_steps: int = 3  # ... or so many that clearly agree
    # Its excess must be so many standard errors of what it is from step to step.
    imbalance_significance: float = 5.0

    # Sequence lengths are looked at once in so many steps: data do not change from one to another.
    lengths_steps: int = 8
    lengths_first_steps: int = 3  # the first time
    # Equal microbatches must save this share of the step time: packing differently is work.
    lengths_cost: float = 0.05
    # Lengths must explain this share of how compute times differ, or something else does.
    lengths_explained: float = 0.3

    # Pauses for garbage collection are told when they cost this share of the step time more than
    # the same pauses would if all ranks took them together. A healthy job of a thousand ranks,
    # each with a pause of a hundredth of a step now and then, loses 1-1.5% so.
    gc_share: float = 0.025
    gc_window: int = 48
    gc_pauses: int = 5  # steps with a pause that long: a few are an accident ...
    gc_least_pauses: int = 3  # ... but not when in so many steps they cost so many times that:
    gc_recent_steps: int = 8
    gc_obvious: float = 2.5
    # Taken together in the same steps, as is advised, they are told when they take this share.
    gc_together_share: float = 0.1

    # A checkpoint is slow when it takes this many times what others or earlier ones take ...
    checkpoint_ratio: float = 2.0
    # ... and this share of a step longer: below that nobody notices.
    checkpoint_step_share: float = 0.3
    # Share of all time at which blocking for checkpoints is worth advice; saving asynchronously
    # wins about half of it back.
    checkpoint_cost: float = 0.08

    # All ranks of a node this much slower than usual count as a noisy step ...
    host_noise_slowdown: float = 1.08
    # ... of which there must be so many, in several stretches, but not nearly all: what slows a
    # node in every step is the node, not something that runs there now and then.
    host_noise_window: int = 24
    host_noise_least_share: float = 0.15
    host_noise_most_share: float = 0.75
    host_noise_stretches: int = 3
    # The host must say so too: this share of the time tasks waited for a CPU, and this many times
    # what other nodes measure.
    host_noise_pressure: float = 0.15
    host_noise_ratio: float = 2.0
    host_noise_warning_cost: float = 0.05

    # Idle share beyond theory that slow transfers make, as a mean over the stages.
    bubble_excess: float = 0.12
    # The same of late launches and uneven microbatches, which scheduling jitter makes as well: on
    # a machine with fewer cores than ranks they alone reach 0.05-0.15.
    bubble_unexplained_excess: float = 0.30
    bubble_window: int = 20
    bubble_hits: int = 16
    # Above this excess the bubble is worth a warning rather than a note.
    bubble_warning_excess: float = 0.25

    # No progress, to be told within 3 s: pages are looked at each 0.5 s, delivery and a tick take
    # up to 0.4 s. The multiple is of what the operation (or the step) usually takes.
    hang_floor_seconds: float = 2.4
    hang_step_multiple: float = 3.0
    # The same page seen for so long by the agent itself, whatever times the page bears: four looks.
    hang_looked_seconds: float = 1.5
    # A process that is stopped or gone is no guess: half the floor is enough.
    hang_confirmed_seconds: float = 1.5
    # Imports, rendezvous and the first (compiling) steps may legitimately be silent for long.
    hang_startup_seconds: float = 120.0
    # Checkpoints to slow shared storage block every rank at once.
    hang_checkpoint_seconds: float = 60.0
    # An evaluation's forwards are often not hooked: nothing may be recorded for long.
    hang_evaluation_seconds: float = 20.0
    # Older news about a rank says nothing about now: delivery is what stands still, not training.
    hang_freshness_seconds: float = 2.5
    # Steps that must be known before their p99 means anything.
    hang_known_steps: int = 3

    # An agent sends several batches a second; five seconds are an outage, not jitter.
    node_lease_seconds: float = 5.0
    # What comes later is no backlog of the server: a clock was set back, or a spool is emptied.
    latest_news_seconds: float = 60.0
    # Peers of a dead rank exit within milliseconds: wait so long for the one that died first.
    exit_settle_seconds: float = 0.6
    # Whether memory had run out is known once the agent has looked into the kernel's log, which it
    # does at once when a rank is killed.
    exit_kernel_log_seconds: float = 0.8
    # A warning of a GPU that goes on stands for so long after its last error.
    gpu_error_told_seconds: float = 600.0
    # Drivers are busy for seconds at times: a GPU that does not answer is told after so long.
    gpu_hung_seconds: float = 10.0
    # The ticks stood still for longer: the silence since is our own, and starts anew.
    own_pause_seconds: float = 2.0
