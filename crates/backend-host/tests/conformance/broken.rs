//! The suite with ranks as processes, where a process does what none may do: the case fails, says which rank it was, and leaves nothing
//! behind.
//!
//! The test program runs itself as the suite, and the suite runs it as each rank.

use std::process::{Command, Stdio, exit};
use std::{env, fs, thread};

use ep_core::Rank;
use libtest_mimic::Trial;

/// Makes this program the suite, and says what is broken.
const BREAK: &str = "EP_HOST_TEST_BREAK";
/// Marks the processes of one run.
const RUN: &str = "EP_HOST_TEST_RUN";
const CASE: &str = "processes::memory_rings_of_one_slot";

/// What rank 2 does when it has joined, in the processes of a run of which something is broken; whether it misreads rows.
pub(crate) fn befall(rank: Rank) -> Result<bool, String> {
    if rank != Rank(2) {
        return Ok(false);
    }
    match env::var(BREAK).as_deref() {
        Ok("exit") => exit(3),
        Ok("abort") => std::process::abort(),
        Ok("chatter") => println!("a library says hello"),
        Ok("panic") => panic!("on purpose"),
        Ok("misread") => return Ok(true),
        Ok("refuse") => return Err("it does not want to".into()),
        _ => {}
    }
    Ok(false)
}

/// Processes of this machine that were started for `run`.
fn left(run: &str) -> usize {
    let mark = format!("{RUN}={run}");
    let ours = |entry: &fs::DirEntry| {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    fs::read_dir("/proc").map_or(0, |entries| entries.flatten().filter(ours).count())
}

/// Runs a case of the suite in which something is broken: it must fail, or pass, and say so.
fn broken(what: &str, limit: &str, passes: bool, says: &str) -> Result<(), String> {
    let run = format!("{what}-{}-{:?}", std::process::id(), thread::current().id());
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(["--exact", CASE, "--test-threads=1"]).env(BREAK, what).env(RUN, &run).env("EP_TIME_FACTOR", limit);
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() != passes || !said.contains(says) {
        return Err(format!("ended with {}, said `{said}`, expected `{says}`", output.status));
    }
    match left(&run) {
        0 => Ok(()),
        some => Err(format!("{some} processes were left")),
    }
}

/// The cases; none in the suite that they run.
pub(crate) fn trials() -> Vec<Trial> {
    if env::var_os(BREAK).is_some() {
        return Vec::new();
    }
    let trial = |name: &str, what: &'static str, limit: &'static str, passes, says: &'static str| {
        Trial::test(format!("broken::{name}"), move || broken(what, limit, passes, says).map_err(Into::into))
    };
    vec![
        trial("nothing_broken_passes", "nothing", "1", true, "1 passed"),
        trial(
            "a_process_that_exits_is_named",
            "exit",
            "1",
            false,
            "the process of rank 2 ended, which nothing asked for: exit status: 3",
        ),
        trial(
            "a_process_that_aborts_is_named",
            "abort",
            "1",
            false,
            "the process of rank 2 ended, which nothing asked for: signal: 6",
        ),
        trial(
            "a_process_that_panics_is_named",
            "panic",
            "1",
            false,
            "the process of rank 2 ended, which nothing asked for: exit status: 101",
        ),
        trial(
            "a_process_that_writes_to_the_pipe_is_named",
            "chatter",
            "1",
            false,
            "the process of rank 2 wrote what nobody understands",
        ),
        trial("a_rank_that_does_not_join_is_named", "refuse", "1", false, "rank 2: it does not want to"),
        // Its results are judged in the process of another rank.
        trial("a_rank_whose_rows_are_wrong_is_named", "misread", "1", false, "round 0: rank 2: recv_x at row 0"),
        trial("a_case_that_takes_too_long_fails", "nothing", "0", false, "not done within 0ns"),
    ]
}
