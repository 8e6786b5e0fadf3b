"""The files of deploy/ are valid for their programs and use existing commands only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.environment import identify, read_rank_environment
from paceline_server.engine.types import Launch
from paceline_server.launchers.registry import recognize
from paceline_wire import node_directory
from paceline_wire.topology import Coordinates, Topology

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_are_executable(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


def slurm(script: str, directory: Path, **more: str) -> str:
    variables = {
        "PATH": os.environ["PATH"],
        "PACELINE_NODE_DIRECTORY": str(directory),
        "PACELINE_AGENT_UNIT": "no-such.service",
        "PACELINE_EPILOG_SECONDS": "0",
        "SLURM_JOB_ID": "77",
        **more,
    }
    done = subprocess.run(
        [DEPLOY / "slurm" / script], env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_slurm_scripts_set_the_ring_directory_and_remove_rings_afterwards(tmp_path: Path) -> None:
    node = tmp_path / "node"
    slurm("prolog.sh", node)
    rings = node / "rings"
    assert rings.stat().st_mode & 0o7777 == 0o3777
    assert rings.parent.stat().st_mode & 0o7777 == 0o711
    lines = slurm("task-prolog.sh", node, SLURM_RESTART_COUNT="2").splitlines()
    assert f"export PACELINE_RING_DIRECTORY={rings}" in lines
    assert "export PACELINE_JOB=slurm-77" in lines
    assert "export PACELINE_GENERATION=200" in lines
    for name in ("slurm-77.g200.r0.ring", "slurm-77.g101.r9.ring", "slurm-770.g0.r0.ring"):
        (rings / name).touch()
    slurm("epilog.sh", node)
    assert [path.name for path in rings.iterdir()] == ["slurm-770.g0.r0.ring"]


@pytest.mark.parametrize("place", ["node", "node/rings"])
def test_slurm_scripts_follow_no_link_that_a_user_put_in_place(tmp_path: Path, place: str) -> None:
    secret = tmp_path / "secret"
    (secret / "rings").mkdir(parents=True, mode=0o700)
    (secret / "slurm-77.g0.r0.ring").touch()
    (secret / "rings" / "slurm-77.g0.r0.ring").touch()
    link = tmp_path / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    for script in ("prolog.sh", "epilog.sh"):
        slurm(script, tmp_path / "node")
    assert [path.stat().st_mode & 0o7777 for path in (secret, secret / "rings")] == [0o755, 0o700]
    assert len(list(secret.rglob("*.ring"))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_the_prolog_changes_no_directory_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "node"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    slurm("prolog.sh", theirs)
    assert (theirs.stat().st_uid, theirs.stat().st_mode & 0o7777) == (65534, 0o700)
    assert not (theirs / "rings").exists()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd/paceline-agent.service").read_text()
    unit = tmp_path / "paceline-agent.service"
    unit.write_text(text.replace("/opt/paceline/bin/paceline", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_runs_nothing_as_root_and_may_create_the_ring_directory() -> None:
    lines = (DEPLOY / "systemd/paceline-agent.service").read_text().splitlines()
    assert not [line for line in lines if line.startswith("Exec") and "=+" in line]
    assert f"User={node_directory.ACCOUNT}" in lines
    assert "RestrictSUIDSGID=yes" not in lines, "it forbids mode 3777"


def test_the_unit_leaves_devices_and_the_state_of_the_clock_accessible() -> None:
    """systemd.exec(5): ProtectClock= filters adjtimex. Any DeviceAllow= denies other devices.

    Before systemd 252, ProtectClock= implies one: https://github.com/systemd/systemd/pull/25075.
    """
    lines = (DEPLOY / "systemd/paceline-agent.service").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert not names & {"ProtectClock", "PrivateDevices", "DevicePolicy", "DeviceAllow"}
    bounding = next(line for line in lines if line.startswith("CapabilityBoundingSet="))
    assert "CAP_SYS_TIME" not in bounding


def test_the_unit_keeps_ranks_alive_for_adoption() -> None:
    """By default, systemd would kill them with their agent."""
    lines = (DEPLOY / "systemd/paceline-agent.service").read_text().splitlines()
    assert "KillMode=process" in lines
    assert "NoNewPrivileges=yes" in lines


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/daemonset.yaml").read_text()))


def test_the_daemon_set_has_the_least_privilege() -> None:
    account, daemons = documents()
    assert account["automountServiceAccountToken"] is False
    pod = daemons["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    may = container["securityContext"]
    assert (may["privileged"], may["allowPrivilegeEscalation"]) == (False, False)
    assert may["readOnlyRootFilesystem"] is True
    assert may["capabilities"] == {"drop": ["ALL"], "add": ["SYSLOG", "SYS_PTRACE"]}
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert labels == daemons["spec"]["selector"]["matchLabels"]


def test_the_agent_accepts_the_command_of_the_daemon_set() -> None:
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    program, name, *options = container["args"]
    assert (program, name) == ("paceline", "agent")
    known = subprocess.run(
        [sys.executable, "-m", "paceline_agent", "--help"], capture_output=True, text=True
    ).stdout
    for option in options:
        assert option.split("=")[0] in known, option


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def test_the_servers_roles_have_the_least_privilege() -> None:
    """That they are enough is tested with them: tests/server/launchers/test_kubernetes.py."""
    documents = manifests("server-rbac.yaml")
    roles = {one["metadata"]["name"]: one["rules"] for one in documents if "rules" in one}
    for rule in (rule for rules in roles.values() for rule in rules):
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
        assert "secrets" not in rule["resources"]
        assert not set(rule["verbs"]) & {"update", "deletecollection", "impersonate", "escalate"}
    assert [rule["resources"] for rule in roles["paceline-nodes"]] == [["nodes"]]
    (account,) = (one for one in documents if one["kind"] == "ServiceAccount")
    cluster_wide = [one for one in documents if one["kind"] == "ClusterRoleBinding"]
    assert [one["roleRef"]["name"] for one in cluster_wide] == ["paceline-nodes"]
    for binding in (one for one in documents if "subjects" in one):
        assert binding["roleRef"]["name"] in roles
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (
            account["metadata"]["name"],
            account["metadata"]["namespace"],
        )


def test_the_jobset_has_what_the_hooks_read(monkeypatch: pytest.MonkeyPatch) -> None:
    (jobset,) = manifests("jobset.yaml")
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    labels = {
        "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "train",
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "u",
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "2",
        "metadata.annotations['jobset.sigs.k8s.io/in-place-restart-attempt']": "",
        "metadata.annotations['paceline/restarts']": "1",
        "metadata.namespace": "training",
        "spec.nodeName": "n0",
    }
    variables = {
        one["name"]: one["value"]
        if "value" in one
        else labels[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }
    for name in ("SLURM_JOB_ID", "PACELINE_JOB", "PACELINE_GENERATION", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = read_rank_environment()
    assert found is not None
    assert (found.job, found.generation) == ("jobset-training.train", 300)
    metadata = identify(found, Topology(), Coordinates(), {}).metadata
    launch = recognize({"n0": metadata})
    assert launch == Launch(
        launcher="kubernetes", job="training/train", uid="u", restarts=3, nodes={"n0": "n0"}
    )
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}
