"""What torchrun's command line means for Lastwords."""

from __future__ import annotations

import pytest
from torch.distributed import run as torch_run

from lastwords.launcher import torchrun
from lastwords.launcher.commands import CommandError, Kind
from lastwords.launcher.torchrun import Size

SIZE = Size(workers=2, processes=4)

TRANSLATED = [
    # line, kind, target, arguments, options without effect
    ("train.py --lr 1", Kind.SCRIPT, "train.py", "--lr 1", ""),
    ("--nproc-per-node 4 --nnodes=2 train.py --nnodes 9", Kind.SCRIPT, "train.py", "--nnodes 9", ""),
    ("--nproc_per_node=gpu --nnodes 1:8 train.py", Kind.SCRIPT, "train.py", "", ""),
    ("-m pkg.train -m", Kind.MODULE, "pkg.train", "-m", ""),
    ("--standalone --max_restarts 3 train.py", Kind.SCRIPT, "train.py", "", "--standalone --max-restarts"),
    (
        "--rdzv-backend=c10d --rdzv_endpoint h:1 --rdzv-id 7 -t 3 -r0 --role=x train.py",
        Kind.SCRIPT, "train.py", "", "--rdzv-backend --rdzv-endpoint --rdzv-id --tee --redirects --role",
    ),
    ("--node-rank 1 --master_addr h --master-port 1 a.py", Kind.SCRIPT, "a.py", "", "--node-rank --master-addr "
     "--master-port"),
    ("--monitor-interval 2 a.py", Kind.SCRIPT, "a.py", "", "--monitor-interval"),
    ("--run-path /a.py x", Kind.SCRIPT, "/a.py", "x", ""),
    ("-- -odd.py", Kind.SCRIPT, "-odd.py", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "target", "arguments", "ignored"), TRANSLATED)
def test_its_command_line_becomes_the_command_of_a_rank(
    line: str, kind: Kind, target: str, arguments: str, ignored: str
) -> None:
    found = torchrun.translate("python3", line.split(), SIZE, launch=False)
    assert found is not None
    command = found.command
    assert (command.interpreter, command.flags) == ("python3", ("-u",))  # as torchrun starts it
    assert (command.kind, command.target, command.arguments) == (kind, target, tuple(arguments.split()))
    assert found.ignored == tuple(ignored.split())
    assert not command.local_rank_argument
    for option in found.ignored:
        assert option in found.notice()


@pytest.mark.parametrize("line", [line for line, *_ in TRANSLATED])
def test_torch_itself_reads_the_same_out_of_it(line: str) -> None:
    theirs = torch_run.get_args_parser().parse_args(line.split())
    ours = torchrun.translate("python", line.split(), SIZE, launch=False)
    assert ours is not None
    assert theirs.training_script == ours.command.target
    assert tuple(theirs.training_script_args) == ours.command.arguments
    assert theirs.module == (ours.command.kind is Kind.MODULE)


def test_every_option_of_this_torch_is_known() -> None:
    actions = [action for action in torch_run.get_args_parser()._actions if action.option_strings]
    left_to_torchrun = {"help", "no-python", "virtual-local-rank", "print-completion"}
    for action in actions:
        name = action.option_strings[-1].lstrip("-").replace("_", "-")
        takes_value = action.nargs != 0
        expected = torchrun._WITH_VALUE if takes_value else torchrun._WITHOUT_VALUE
        assert name in expected or name in left_to_torchrun, name


def test_launch_hands_the_local_rank_over_unless_told_not_to() -> None:
    for line, expected in (("a.py", True), ("--use-env a.py", False), ("--use_env a.py", False)):
        found = torchrun.translate("python", line.split(), SIZE, launch=True)
        assert found is not None
        assert found.command.local_rank_argument is expected


@pytest.mark.parametrize(
    "line", ["--no-python ./a.out", "--virtual-local-rank a.py", "--unheard-of a.py", "-z a.py", "--use-env a.py",
             "--stand a.py", "--standalone=1 a.py", "--role"],
)  # fmt: skip
def test_what_is_not_understood_is_left_to_torchrun_itself(line: str) -> None:
    assert torchrun.translate("python", line.split(), SIZE, launch=False) is None


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nproc-per-node 8 a.py", "asks torchrun for 8 processes per node, and the job has 4 .*--procs 8"),
        ("--nnodes 3 a.py", "asks torchrun for 3 nodes, and the job has 2 workers.*--workers 3"),
        ("--nnodes 3:8 a.py", "asks torchrun for 3:8 nodes"),
        ("--nnodes x a.py", "asks torchrun for x nodes"),
        ("--nproc-per-node 4", "is given nothing to run"),
    ],
)
def test_another_size_than_the_jobs_is_refused_with_what_to_do(line: str, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        torchrun.translate("python", line.split(), SIZE, launch=False)


def test_where_the_size_is_not_known_it_is_not_compared() -> None:
    assert torchrun.translate("python", ["--nproc-per-node", "8", "a.py"], None, launch=False) is not None
