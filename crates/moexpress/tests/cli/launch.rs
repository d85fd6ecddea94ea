//! `moexpress launch` with real processes: shells.

use std::fs;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for a slow machine; what must end promptly ends well before.
const LONG: Duration = Duration::from_secs(20);

/// A script for which a shell starts a process of its own, and which only a signal ends in time.
const FOREVER: &str = "sleep 600; true";

fn command(arguments: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moexpress"));
    command.arg("launch").args(arguments.split_whitespace()).args(["--", "sh", "-c", script]).env_remove("RUST_LOG");
    command
}

fn launch(arguments: &str, script: &str) -> Output {
    command(arguments, script).output().expect("the binary runs")
}

fn start(arguments: &str, script: &str) -> Child {
    command(arguments, script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs")
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Whether a process with this number runs.
fn runs(pid: &str) -> bool {
    let found = Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status();
    found.expect("kill runs").success()
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The exit code of a command that ends in time. Whatever comes of it, the command does not go on.
fn ends(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    let mut ended = None;
    while ended.is_none() && start.elapsed() < LONG {
        thread::sleep(Duration::from_millis(10));
        ended = child.try_wait().unwrap();
    }
    let _ = child.kill();
    ended.and_then(|ended| ended.code())
}

/// Whether a process has started others that it has not let go of.
#[cfg(target_os = "linux")]
fn has_children(pid: u32) -> bool {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let stats = entries.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    // Behind the name, which may hold anything, are the state and the parent.
    let mut parents = stats.filter_map(|stat| stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok());
    parents.any(|parent| parent == pid)
}

/// A script that starts what escapes from its group, writes for ever, and leaves its number in a file.
fn escape(number: &Path) -> String {
    format!(
        "setsid sh -c 'echo $$ >{0}; exec yes' & while [ ! -s {0} ]; do sleep 0.01; done; sleep 0.1",
        number.display()
    )
}

/// Ends what escaped, which has ended by itself where nobody reads its output any more.
fn end_escaped(number: &Path) {
    let number = fs::read_to_string(number).unwrap();
    let _ = Command::new("kill").args(["-9", number.trim()]).stderr(Stdio::null()).status();
}

#[test]
fn each_process_finds_its_place() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT ${#MOEXPRESS_SECRET}";
    let output = launch("-n 4 --nodes 2 --master-port 4321", script);
    assert_eq!(output.status.code(), Some(0));
    let place = |rank: usize| format!("[rank {rank}] {rank}/4 {}/2 {} 127.0.0.1:4321 64", rank % 2, rank / 2);
    assert_eq!(lines(&output.stdout), (0..4).map(place).collect::<Vec<_>>());
    assert!(output.stderr.is_empty());
}

#[test]
fn all_processes_share_a_free_port_and_a_fresh_secret() {
    let seen = |output: &Output| {
        let mut said: Vec<String> = lines(&output.stdout).iter().map(|line| line[9..].to_owned()).collect();
        said.dedup();
        assert_eq!(said.len(), 1, "{said:?}");
        said.remove(0)
    };
    let [first, second] = [0, 1].map(|_| seen(&launch("-n 3", "echo $MASTER_PORT $MOEXPRESS_SECRET")));
    assert_ne!(first.split_once(' ').unwrap().1, second.split_once(' ').unwrap().1);
}

#[test]
fn an_error_of_all_processes_is_said_once() {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let output = launch("-n 4", &format!("exec {program} run --backend host --processes --slots 0"));
    assert_eq!(output.status.code(), Some(2));
    let said = lines(&output.stderr);
    assert_eq!(said.iter().filter(|line| line.contains("ring slots is 0, allowed: ")).count(), 1, "{said:?}");
    // How all ended may take several lines: one that has not come so far when another fails is told to end.
    let [endings, rest] = [true, false].map(|is| said.iter().filter(|line| line.starts_with("  rank") == is).count());
    assert!(endings > 0 && rest == 2, "the error, whose exit code it is, and how all ended: {said:?}");
}

/// They are told which option differs, and by which rank, before a row moves.
#[test]
fn ranks_that_were_given_different_options_are_told_which() {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let batches = "batches, of --tokens, --routing, --drop or --input, by a hash, is '";
    for (option, what) in [
        ("--drop 0.$RANK", [batches, "' on rank 1"]),
        ("--routing skewed:$RANK", [batches, "' on rank 1"]),
        ("--tokens 10,$((5+RANK))", ["tokens of the ranks is '10,", "'10,6' on rank 1"]),
        ("--slots $((3+RANK))", ["--slots is ", "4 on rank 1"]),
        ("$(if [ $RANK = 1 ]; then echo --dtype fp8; fi)", ["--dtype is '", "'fp8 with f32 scales' on rank 1"]),
    ] {
        let output = launch("-n 2", &format!("exec {program} run --backend host --processes --hidden 256 {option}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && what.iter().all(|part| said.contains(part)), "{option}: {said}");
    }
}

#[test]
fn lines_of_different_processes_are_never_mixed() {
    let script = "i=0; while [ $i -lt 200 ]; do printf 'a%s' $RANK; printf 'b%s\\n' $RANK; \
                  printf 'c%s' $RANK >&2; printf 'd%s\\n' $RANK >&2; i=$((i+1)); done; printf end$RANK";
    let output = launch("-n 11", script);
    assert_eq!(output.status.code(), Some(0));
    let mut wanted: Vec<String> = Vec::new();
    let mut errors: Vec<String> = Vec::new();
    for rank in 0..11 {
        wanted.extend((0..200).map(|_| format!("[rank {rank:>2}] a{rank}b{rank}")));
        wanted.push(format!("[rank {rank:>2}] end{rank}"));
        errors.extend((0..200).map(|_| format!("[rank {rank:>2}] c{rank}d{rank}")));
    }
    wanted.sort();
    errors.sort();
    assert_eq!(lines(&output.stdout), wanted);
    assert_eq!(lines(&output.stderr), errors);
}

#[test]
fn when_one_fails_the_others_end_and_its_code_is_passed_on() {
    let start = Instant::now();
    let output = launch("-n 4", &format!("if [ $RANK = 2 ]; then exit 7; fi; {FOREVER}"));
    assert_eq!(output.status.code(), Some(7));
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
    assert!(String::from_utf8_lossy(&output.stderr).contains("error: rank 2 ended with exit code 7"));
}

#[test]
fn the_others_go_on_when_one_fails_if_they_are_told_to() {
    let script = "if [ $RANK = 0 ]; then exit 7; fi; sleep 0.5; test -n \"$MOEXPRESS_MEETING\" && echo went on";
    let output = launch("-n 3 --keep-going", script);
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.matches("went on").count(), 2, "{said}");
}

/// They wait for 60 s otherwise.
#[test]
fn who_waits_at_the_meeting_place_for_one_that_ended_is_told() {
    for (options, ends) in [("-n 3 --keep-going", 7), ("-n 3", 0)] {
        let start = Instant::now();
        let run = format!(
            "exec {} run --backend host --processes --experts 6 --tokens 4 --hidden 64",
            env!("CARGO_BIN_EXE_moexpress")
        );
        let output = launch(options, &format!("if [ $RANK = 1 ]; then exit {ends}; fi; {run}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("rank 1 ended before joining"), "{said}");
        assert_eq!(output.status.code(), Some(if ends == 0 { 1 } else { ends }), "{said}");
        assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
    }
}

#[test]
fn one_that_a_signal_ends_counts_as_128_and_the_signal() {
    let output = launch("-n 2", &format!("if [ $RANK = 0 ]; then kill -9 $$; fi; {FOREVER}"));
    assert_eq!(output.status.code(), Some(137));
    assert!(String::from_utf8_lossy(&output.stderr).contains("rank 0 was ended by signal 9 (SIGKILL)"));
}

/// The others notice at once that rank 3 is gone, and end as well: whoever looks at ranks in their order sees rank 0 first.
#[test]
fn the_first_that_failed_is_named_with_its_signal_whatever_its_rank() {
    for _ in 0..8 {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let script = format!(
            "if [ $RANK = 3 ]; then exec 3>{0}; sleep 0.2; kill -9 $$; fi; read line <{0}; exit 1",
            pipe.display()
        );
        let output = launch("-n 4", &script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.starts_with("error: rank 3 was ended by signal 9 (SIGKILL); "), "{said}");
        assert_eq!(output.status.code(), Some(137));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn all_ends_are_listed_in_their_order() {
    let list = |options: &str, rank_0: &str| {
        let folder = tempfile::tempdir().unwrap();
        // One that has ended keeps its number until all have.
        let script = format!(
            "ended() {{ while [ ! -s {0}/$1 ]; do sleep 0.01; done; \
             until grep -q ') Z ' /proc/$(cat {0}/$1)/stat; do sleep 0.01; done; sleep 0.5; }}; \
             echo $$ > {0}/$RANK; \
             case $RANK in 0) {rank_0};; 1) exit 0;; 2) ended 1; kill -15 $$;; 3) sleep 600;; esac",
            folder.path().display()
        );
        let said = String::from_utf8_lossy(&launch(options, &script).stderr).into_owned();
        said.split_once("in this order:\n").unwrap_or_else(|| panic!("{said}")).1.to_owned()
    };
    assert_eq!(
        list("-n 3 --keep-going", "ended 2; exit 3"),
        "  rank 1: exit code 0\n  rank 2: signal 15 (SIGTERM)\n  rank 0: exit code 3\n"
    );
    let told = "  rank 1: exit code 0\n  rank 2: signal 15 (SIGTERM)\n  ranks 0, 3: signal 15 (SIGTERM), after it was told to end\n";
    assert_eq!(list("-n 4", "sleep 600"), told);
}

#[test]
fn what_is_stopped_ends_when_it_is_told_to() {
    let output = launch("-n 2 --grace 60s", "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 0.3; exit 7");
    assert_eq!(output.status.code(), Some(7));
    // After the grace period it would be signal 9.
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("\n  rank 1: signal 15 (SIGTERM), after it was told to end"), "{said}");
}

#[test]
fn ctrl_c_is_told_at_once_and_ends_what_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let ready = |rank: u32| folder.path().join(format!("ready{rank}"));
    let script =
        format!("touch {}/ready$RANK; if [ $RANK = 1 ]; then kill -STOP $$; fi; {FOREVER}", folder.path().display());
    let child = start("-n 3 --grace 60s", &script);
    wait_for("all are ready", || (0..3).all(|rank| ready(rank).exists()));
    thread::sleep(Duration::from_millis(100));
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.starts_with("SIGINT: passed on to ranks 0 to 2; what runs after 60s, or when it comes again, is killed\n"),
        "{said}"
    );
    // After the grace period it would be signal 9.
    assert!(
        said.contains(
            "error: ended by SIGINT; the processes ended in this order:\n  ranks 0 to 2: signal 2 (SIGINT), after"
        ),
        "{said}"
    );
}

#[test]
fn when_the_launcher_is_killed_nothing_is_left_running() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    // One that ends when told, one that does not, and one that is stopped; each has started another.
    let script = format!(
        "sleep 600 & echo $! > {0}/child$RANK; if [ $RANK = 1 ]; then trap '' TERM; fi; echo $$ > {0}/rank$RANK; \
         if [ $RANK = 2 ]; then kill -STOP $$; fi; while true; do sleep 0.1; done",
        here.display()
    );
    let mut child = start("-n 3 --grace 300ms", &script);
    let files = || (0..3).flat_map(|rank| ["child", "rank"].map(|name| here.join(format!("{name}{rank}"))));
    let written = |path: &std::path::PathBuf| fs::metadata(path).is_ok_and(|data| data.len() > 1);
    wait_for("all have started", || files().all(|path| written(&path)));
    child.kill().unwrap();
    child.wait().unwrap();
    for path in files() {
        let pid = fs::read_to_string(&path).unwrap();
        wait_for(&format!("{} is gone", path.display()), || !runs(pid.trim()));
    }
}

#[test]
fn who_does_not_end_when_told_is_killed_after_the_grace_period() {
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let script = format!(
        "trap '' TERM; if [ $RANK = 0 ]; then touch {0}/deaf; while true; do sleep 0.1; done; fi; \
         while [ ! -e {0}/deaf ]; do sleep 0.01; done; sleep 0.5; exit 3",
        folder.path().display()
    );
    let output = launch("-n 2 --grace 300ms", &script);
    assert_eq!(output.status.code(), Some(3));
    assert!(start.elapsed() >= Duration::from_millis(800) && start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

#[test]
fn nothing_is_left_running() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {}; sleep 600 & echo $! > child$RANK; echo $$ > rank$RANK; while [ ! -s rank0 ]; do sleep 0.01; done; exit $RANK",
        folder.path().display()
    );
    assert_eq!(launch("-n 2", &script).status.code(), Some(1));
    for file in fs::read_dir(folder.path()).unwrap() {
        let pid = fs::read_to_string(file.unwrap().path()).unwrap();
        wait_for("it is gone", || !runs(pid.trim()));
    }
}

#[test]
fn signals_are_passed_on_and_end_everything() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path();
        let script = format!(
            "trap 'echo told > {0}/told$RANK; exit 0' {signal}; touch {0}/ready$RANK; while true; do sleep 0.05; done",
            here.display()
        );
        let mut child = start("-n 3", &script);
        wait_for("all are ready", || (0..3).all(|rank| here.join(format!("ready{rank}")).exists()));
        assert!(Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!((0..3).all(|rank| here.join(format!("told{rank}")).exists()), "all were told");
    }
}

#[test]
fn when_nobody_reads_the_output_everything_ends() {
    let mut child = start("-n 2", "while true; do echo line; sleep 0.01; done");
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.starts_with(b"error: nobody reads the output any more; "), "{output:?}");
}

#[test]
fn bad_arguments_are_refused() {
    let output = launch("-n 3 --nodes 2", "true");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("3 processes on 2 nodes, allowed: the same number"));
    for arguments in ["launch -n 0 -- true", "launch -n 2", "launch -n 2 -- /no/such/command"] {
        let refusal = super::moexpress(arguments).refusal();
        assert!(!refusal.is_empty());
    }
    let refusal = super::moexpress("launch -n 2 -- /no/such/command").refusal();
    assert!(refusal.contains("cannot start '/no/such/command': No such file"), "{refusal}");
}

/// Lines are not lost to a reader that is slow, and a job whose lines nobody could read has failed.
#[test]
#[cfg(target_os = "linux")]
fn all_lines_reach_a_slow_reader_and_unread_ones_are_a_failure() {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let shell = |line: String| Command::new("bash").args(["-c", &line]).output().expect("bash runs");
    let slow = shell(format!("set -o pipefail; {program} launch -n 1 -- seq 1 20000 | (sleep 3; wc -l)"));
    assert_eq!(String::from_utf8_lossy(&slow.stdout).trim(), "20000", "{slow:?}");
    let full = shell(format!("{program} launch -n 2 -- echo here >/dev/full"));
    assert_eq!(full.status.code(), Some(1), "{full:?}");
    let said = "error: the output cannot be written: No space left on device";
    assert!(String::from_utf8_lossy(&full.stderr).starts_with(said), "{full:?}");
}

/// What `nohup` has ignored stays so.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_that_was_ignored_at_the_start_ends_nothing() {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let line = format!("trap '' HUP; {program} launch -n 1 -- sleep 2 & sleep 0.7; kill -HUP $!; wait $!");
    let done = Command::new("bash").args(["-c", &line]).output().expect("bash runs");
    assert_eq!(done.status.code(), Some(0), "{done:?}");
}

/// A reader that is slow is none that is gone, whatever the stream does when it is full.
#[test]
fn all_lines_reach_a_slow_reader_of_a_stream_that_does_not_block() {
    const LINES: usize = 50_000;
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let script = format!("seq 1 {LINES}");
    let mut child = command("-n 1", &script).stdout(OwnedFd::from(theirs)).spawn().expect("the binary runs");
    thread::sleep(Duration::from_millis(500));
    let mut said = String::new();
    ours.read_to_string(&mut said).unwrap();
    assert_eq!(said.lines().count(), LINES);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// What escaped from its group and writes for ever keeps the command for a while, not for ever.
#[test]
#[cfg(target_os = "linux")]
fn what_escaped_and_goes_on_writing_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let escaped = folder.path().join("escaped");
    let script = escape(&escaped);
    let mut child = command("-n 1", &script).stdout(Stdio::null()).spawn().expect("the binary runs");
    let ended = ends(&mut child);
    child.wait().unwrap();
    end_escaped(&escaped);
    assert_eq!(ended, Some(0));
}

/// A reader that takes the lines of what escaped one by one would be served for hours.
#[test]
#[cfg(target_os = "linux")]
fn what_escaped_is_not_waited_for_where_the_reader_is_slow() {
    let folder = tempfile::tempdir().unwrap();
    let escaped = folder.path().join("escaped");
    let script = escape(&escaped);
    let mut child = start("-n 1", &script);
    let mut output = child.stdout.take().unwrap();
    let reader = thread::spawn(move || {
        let mut some = [0; 64];
        while output.read(&mut some).is_ok_and(|read| read > 0) {
            thread::sleep(Duration::from_millis(10));
        }
    });
    let ended = ends(&mut child);
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    end_escaped(&escaped);
    assert_eq!(ended, Some(1), "{said}");
    assert!(
        said.contains("error: the last lines were not read within 10s, and what has left the job goes on"),
        "{said}"
    );
    drop(reader);
}

/// Nor does it wait for whoever does not read its own words.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_is_passed_on_where_nobody_reads_what_is_said_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let mut child = start("-n 1", &format!("touch {}; yes >&2", ready.display()));
    wait_for("it writes", || ready.exists());
    thread::sleep(Duration::from_millis(300));
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    let ended = ends(&mut child);
    child.wait().unwrap();
    assert_eq!(ended, Some(130));
}

/// A core that this process may run on.
#[cfg(target_os = "linux")]
fn one_core() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    cores.trim().split(['-', ',']).next().unwrap().to_owned()
}

/// A process on the only core may run before the command, which started it, does anything more.
#[test]
#[cfg(target_os = "linux")]
fn when_the_launcher_is_killed_as_it_starts_a_process_that_ends_too() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let program = env!("CARGO_BIN_EXE_moexpress");
    for _ in 0..2 {
        let script = format!("echo $$ >{}; kill -9 $PPID; exec sleep 600", pid.display());
        let mut command = Command::new("taskset");
        command.args(["-c", &one_core(), program, "launch", "-n", "1", "--grace", "300ms", "--", "sh", "-c", &script]);
        let output = command.stdin(Stdio::null()).output().expect("taskset runs");
        assert_eq!(output.status.code(), None, "it was killed: {output:?}");
        let pid = fs::read_to_string(&pid).unwrap();
        wait_for("it is gone", || !runs(pid.trim()));
    }
}

/// Lines that a signal cuts off were not read.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_while_lines_wait_for_their_reader_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    // More than the command's own pipe holds, and less than makes the process wait.
    let mut child = start("-n 1", &format!("seq 1 14000; touch {}", done.display()));
    wait_for("it has written all", || done.exists());
    // Before that the signal would be passed on.
    wait_for("the process is gone", || !has_children(child.id()));
    assert!(Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(said.contains("nobody reads the output any more"), "{said}");
}
