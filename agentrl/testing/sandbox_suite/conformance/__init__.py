"""Common behavior of all back-ends: files, programs, and state between calls."""

from __future__ import annotations

from agentrl.testing.sandbox_suite.conformance import calls, files, life
from agentrl.testing.sandbox_suite.stage import Check

CONFINED = (calls.not_root, files.permissions)
TIMED = (calls.stdin, calls.timeouts, calls.timeouts_kill_the_tree, life.python_session, life.bash_session)


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
        calls.a_full_process_table,
        calls.too_much_input,
        calls.streams,
        calls.large_output_is_exact,
        calls.output_is_cut_in_the_middle,
        calls.endless_output_ends,
        calls.large_commands,
        calls.stdin,
        calls.cannot_start,
        calls.environment,
        calls.working_directory,
        calls.timeouts,
        calls.timeouts_kill_the_tree,
        calls.cpu_limit,
        calls.python_is_fresh,
        calls.python_ends_like_python,
        calls.python_can_import,
        calls.python_is_reproducible,
        calls.a_server_inside,
        calls.localhost_has_an_address,
        calls.a_terminal,
        calls.not_root,
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
