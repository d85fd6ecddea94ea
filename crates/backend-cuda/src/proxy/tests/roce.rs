//! The far verbs over RDMA, between two processes: each a device of CPU threads, whose proxy posts to a device of ep-roce. Needs two RDMA
//! devices, named by `SOFTROCE_DEVICES` or `EP_ROCE_DEVICES`, and so is not run by default: `ci/roce` has them.

use std::env;
use std::io::{BufRead as _, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use ep_roce::Roce;

use super::pair::{End, Home};
use super::*;
use crate::proxy::Staged;

/// What the other process is to do.
const PLAN: &str = "EP_PROXY_TEST_PLAN";
/// What a plan begins with whose rows are staged.
const STAGED: &str = "staged ";
/// Stands before what it says.
const MARK: &str = "rank says: ";
const TRAFFICS: [(u32, Traffic); 3] = [
    (0, Traffic { seed: 11, staged: 1, ..TRAFFIC }),
    (3, Traffic { seed: 12, staged: 4, ..TRAFFIC }),
    (9, Traffic { seed: 13, staged: 16, ..TRAFFIC }),
];

fn network() -> Roce {
    let named = env::var("EP_ROCE_DEVICES").ok();
    let named = named.or_else(|| Some(env::var("SOFTROCE_DEVICES").ok()?.replace(',', "/")));
    let named = named.expect("RDMA devices: SOFTROCE_DEVICES or EP_ROCE_DEVICES; see ci/softroce/run");
    Roce::new(ep_roce::Settings::new().devices(named.parse().expect("names of devices")))
}

fn end(me: Rank, log_slots: u32) -> End<ep_roce::RoceLanes> {
    End::new(me, network(), log_slots, Home::Host, HostMemory::new)
}

/// A rank whose window no adapter reaches.
fn staged(me: Rank, log_slots: u32) -> End<<Staged<Roce> as Transport>::Lanes> {
    End::new(me, Staged(network()), log_slots, Home::Device, HostMemory::new)
}

/// A rank's part in the exchange of offers, by lines of text.
fn meet<L: Lanes>(end: &mut End<L>, say: &mut dyn FnMut(&str), hear: &mut dyn FnMut() -> String) {
    let own = end.lanes.offer().expect("an offer");
    say(&own.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let text = hear();
    let digits = |at| u8::from_str_radix(text.get(at..at + 2).expect("two digits"), 16).expect("a byte");
    let theirs: Vec<u8> = (0..text.len()).step_by(2).map(digits).collect();
    let offers = if end.me == A { [own, theirs] } else { [theirs, own] };
    end.lanes.connect(&offers.map(Some)).expect("connected");
}

/// The process of B.
struct Other {
    process: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Other {
    fn start(plan: &str) -> Self {
        let mut command = Command::new(env::current_exe().expect("this program"));
        let name = "proxy::tests::roce::the_other_rank";
        command.args(["--ignored", "--exact", name, "--nocapture"]).env(PLAN, plan);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let said = BufReader::new(process.stdout.take().expect("piped")).lines();
        Self { process, said }
    }

    fn say(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("piped");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("it lives");
    }

    fn hear(&mut self) -> String {
        let mut words = self
            .said
            .by_ref()
            .map_while(Result::ok)
            .filter_map(|line| line.split_once(MARK).map(|(_, word)| word.to_owned()));
        words.next().expect("it says something before it ends")
    }

    fn meet<L: Lanes>(&mut self, end: &mut End<L>) {
        let theirs = self.hear();
        meet(end, &mut |own| self.say(own), &mut || theirs.clone());
    }
}

fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone hears nothing.
    let _ = writeln!(out, "{MARK}{what}").and_then(|()| out.flush());
}

#[test]
#[ignore = "no test by itself: the body of a rank that another test starts"]
fn the_other_rank() {
    let plan = env::var(PLAN).expect("the test that starts it says what it is to do");
    match plan.strip_prefix(STAGED) {
        Some(plan) => be_the_other(plan, staged),
        None => be_the_other(&plan, end),
    }
}

fn be_the_other<L: Lanes>(plan: &str, end: fn(Rank, u32) -> End<L>) {
    let device = Device::usual().expect("compiled");
    let number: usize = plan.parse().unwrap_or(0);
    let (log_slots, traffic) = TRAFFICS[number];
    let mut end = end(B, log_slots);
    let lines = &mut std::io::stdin().lines();
    meet(&mut end, &mut say, &mut || lines.next().expect("an offer").expect("text"));
    if plan == "wait" {
        // To be killed.
        return drop(lines.next());
    }
    say(&traffic.receive(&end, device).err().unwrap_or_default());
    // Until the sender has all that it was owed.
    drop(lines.next());
}

/// What arrives at another process.
fn arrives<L: Lanes>(kind: &str, end: fn(Rank, u32) -> End<L>) {
    let device = Device::usual().expect("compiled");
    for (number, (log_slots, traffic)) in TRAFFICS.into_iter().enumerate() {
        let mut other = Other::start(&format!("{kind}{number}"));
        let mut end = end(A, log_slots);
        other.meet(&mut end);
        assert_eq!(traffic.send(&end, device), Ok(()), "{traffic:?}");
        assert_eq!(other.hear(), "", "{traffic:?}");
        assert_eq!(end.lanes.broken(B), None);
    }
}

/// F1, F3, F5, F9 over RDMA.
#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn what_a_device_posts_arrives_intact_at_another_process_over_roce() {
    arrives("", end);
}

/// The same where no adapter reaches the windows.
#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn staged_rows_arrive_intact_at_another_process_over_roce() {
    arrives(STAGED, staged);
}

/// F6, F7: a device whose peer's process was killed is told so.
#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn a_killed_process_ends_verbs_by_name_over_roce() {
    is_named_when_killed("wait", end);
}

#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn a_killed_process_ends_verbs_of_staged_rows_by_name_over_roce() {
    is_named_when_killed(&format!("{STAGED}wait"), staged);
}

fn is_named_when_killed<L: Lanes>(plan: &str, end: fn(Rank, u32) -> End<L>) {
    let device = Device::usual().expect("compiled");
    let mut other = Other::start(plan);
    let mut end = end(A, 2);
    other.meet(&mut end);
    let (lane, at) = (end.poster(device), end.arena().0);
    let post = || {
        let ticket = lane.put([at, at, 4096], LONG)?;
        match lane.flush(ticket, LONG) {
            FarStatus::Ok => Ok(()),
            status => Err(status),
        }
    };
    assert_eq!(post(), Ok(()));
    other.process.kill().expect("killed");
    let began = Instant::now();
    let status = loop {
        match post() {
            Ok(()) if began.elapsed() < LONG => {}
            status => break status,
        }
    };
    assert_eq!(status, Err(FarStatus::Broken));
    assert!(matches!(end.lanes.broken(B), Some(Fault::LaneBroken { .. })), "{:?}", end.lanes.broken(B));
}

/// For a machine without a compiler: writes the verbs, compiled, to where `EP_FAR_DEVICE` says; there they are taken from.
#[test]
#[ignore = "no test by itself: ci/roce takes what it compiles along"]
fn the_verbs_are_compiled_for_elsewhere() {
    let to = env::var_os(device::COMPILED).expect("EP_FAR_DEVICE: where to write it");
    std::fs::write(to, device::compiled(None).expect("a compiler")).expect("written");
}
