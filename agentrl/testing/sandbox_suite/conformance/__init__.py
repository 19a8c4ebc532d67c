"""What every back-end does alike: files, programs, and what stays between calls."""

from __future__ import annotations

from agentrl.testing.sandbox_suite.conformance import files, life, programs
from agentrl.testing.sandbox_suite.stage import Check

CONFINED = (programs.not_root, files.permissions)
TIMED = (
    programs.stdin,
    programs.timeouts,
    programs.timeouts_kill_the_tree,
    life.python_session,
    life.bash_session,
)


def checks() -> list[Check]:
    """All of them."""
    functions = (
        files.text_files,
        files.binary_files,
        files.large_files,
        files.overwriting,
        files.folders,
        files.removing_what_is_locked,
        files.file_errors,
        files.permissions,
        files.trees,
        files.large_trees,
        files.tree_limits,
        files.temporary_files,
        files.snapshots,
        programs.a_full_process_table,
        programs.too_much_input,
        programs.streams,
        programs.large_output_is_exact,
        programs.output_is_cut_in_the_middle,
        programs.endless_output_ends,
        programs.large_commands,
        programs.stdin,
        programs.cannot_start,
        programs.environment,
        programs.working_directory,
        programs.timeouts,
        programs.timeouts_kill_the_tree,
        programs.cpu_limit,
        programs.python_is_fresh,
        programs.python_ends_like_python,
        programs.python_can_import,
        programs.python_is_reproducible,
        programs.a_server_inside,
        programs.localhost_has_an_address,
        programs.a_terminal,
        programs.not_root,
        life.python_session,
        life.bash_session,
        life.background_jobs_of_a_session,
        life.sessions_live_side_by_side,
        life.sqlite_session,
        life.a_used_box_is_never_handed_out,
        life.usage,
        life.calls_queue_up,
        life.cancelling,
        life.closing,
        life.limits_of_the_box_stay,
    )
    return [Check(f.__name__, "conformance", f, isolating=f in CONFINED, alone=f in TIMED) for f in functions]
