"""The repair arm: what becomes of real trainings when something fails.

Trainings of torch, Hugging Face and the reference trainer (`trainings`, `trainers/`) run on a
cluster in which everything can fail (`cluster`). `schedule` draws their faults (`faults`) from the
seed; `trial` injects one and judges the outcome; `torchrun` plays the same faults without Paceline.
`ettr` has the time that a job loses to random faults, `noise` the jobs that nothing happens to.
"""
