//! The guest's pair of interfaces, on which packets can be lost, delayed, or all of them swallowed.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The interfaces under the two devices.
const ENDS: [&str; 2] = ["v0", "v1"];

/// A disturbance, until this is dropped.
pub(crate) struct Link;

impl Link {
    /// `how` as netem understands it: `loss 1%`, `delay 2ms`.
    pub(crate) fn disturb(how: &str) -> Self {
        batch(&format!("add dev DEV root netem {how}"));
        Self
    }

    /// Another disturbance in its place; `loss 0%` is none. What was counted stays.
    pub(crate) fn change(&self, how: &str) {
        batch(&format!("change dev DEV root netem {how}"));
    }

    /// Loses all packets for `hole`; how long it was before and after that, at most.
    pub(crate) fn swallow(&self, hole: Duration) -> Duration {
        first(|| {
            let began = Instant::now();
            self.change("loss 100%");
            thread::sleep(hole);
            self.change("loss 0%");
            began.elapsed()
        })
    }

    /// Packets that were lost at both ends so far.
    pub(crate) fn lost(&self) -> u64 {
        ENDS.iter().map(|end| lost_at(end)).sum()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        batch("del dev DEV root");
    }
}

/// Runs `work` on a thread that goes before all others, as do the processes that it starts. Ranks keep all cores busy, and a
/// blackhole is to end when it should.
fn first<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let raised = || {
        rustix::process::setpriority_process(None, -20).expect("the guest's user is root");
        work()
    };
    thread::scope(|scope| scope.spawn(raised).join()).expect("the link is disturbed")
}

/// The same at both ends, by one process: starting it takes long on an emulated machine.
fn batch(command: &str) {
    let mut tc = Command::new("tc").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("tc starts");
    let lines: String = ENDS.iter().map(|end| format!("qdisc {command}\n").replace("DEV", end)).collect();
    tc.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("tc reads");
    assert!(tc.wait().expect("tc ends").success(), "tc: {lines}");
}

fn lost_at(end: &str) -> u64 {
    let shown = Command::new("tc").args(["-s", "qdisc", "show", "dev", end]).output().expect("tc starts");
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let number = text.split_once("(dropped ").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("tc says nothing of lost packets: {text}"))
}
