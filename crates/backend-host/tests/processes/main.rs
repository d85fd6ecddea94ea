//! Ranks that are processes: they meet as a launcher tells them, work in both modes, and some are killed.
//!
//! The test binary runs itself again as each rank.

mod kills;
mod rank;
mod zombies;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep_bootstrap::{MEETING_VARIABLE, MeetingPlace, SECRET_VARIABLE, Secret};
use rank::{MARK, PLAN};

/// Of the job.
const SECRET: &str = "test";

/// More than anything takes that works.
const LONG: Duration = Duration::from_secs(60);

/// A rank that was started. Dropped, it is killed; when its test fails, all that it wrote is shown, with the time since its start.
struct Started {
    rank: u32,
    process: Child,
    said: Receiver<String>,
    written: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Drop for Started {
    fn drop(&mut self) {
        let killed = self.process.kill();
        let ended = self.process.wait();
        if thread::panicking() {
            // They end with the process.
            self.readers.drain(..).for_each(|reader| drop(reader.join()));
            let written = self.written.lock().map_or_else(|_| Vec::new(), |written| written.clone());
            let lines = written.iter().fold(String::new(), |lines, line| lines + "\n  " + line);
            println!("rank {} wrote:{lines}\n  and ended: {ended:?}, killed at last: {killed:?}", self.rank);
        }
    }
}

impl Started {
    fn new(rank: u32, world: u32, nodes: u32, port: u16, held: Option<SocketAddr>, plan: &str) -> Self {
        let (local, local_world) = (rank % (world / nodes), world / nodes);
        let [rank, world, local, local_world] = [rank, world, local, local_world].map(|number| number.to_string());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "rank::a_rank_that_was_started", "--nocapture", "--test-threads=1"]);
        command.env(PLAN, plan).env(SECRET_VARIABLE, SECRET);
        command.envs(held.map(|address| (MEETING_VARIABLE, address.to_string())));
        command
            .env("RANK", &rank)
            .env("WORLD_SIZE", &world)
            .env("LOCAL_RANK", &local)
            .env("LOCAL_WORLD_SIZE", &local_world);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        let started = Instant::now();
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (says, said) = channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let (out, errors) = (process.stdout.take().unwrap(), process.stderr.take().unwrap());
        let note = move |written: &Mutex<Vec<String>>, line: &str| {
            let line = format!("{:7.3} s {line}", started.elapsed().as_secs_f64());
            written.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        };
        let (of_out, of_errors) = (Arc::clone(&written), Arc::clone(&written));
        let hear = thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                note(&of_out, &line);
                // What the test harness says may stand before it on the line.
                if let Some((_, word)) = line.split_once(MARK) {
                    let _ = says.send(word.to_owned());
                }
            }
        });
        let keep = thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| note(&of_errors, &line));
        });
        let rank = rank.parse().unwrap();
        Self { rank, process, said, written, readers: vec![hear, keep] }
    }

    fn hear(&self) -> String {
        self.said.recv_timeout(LONG).expect("the rank says something before it ends")
    }

    fn succeeds(&mut self) {
        assert!(self.process.wait().unwrap().success());
    }
}

fn start(world: u32, plan: &str) -> Vec<Started> {
    start_on(1, world, plan)
}

fn start_on(nodes: u32, world: u32, plan: &str) -> Vec<Started> {
    // Free a moment ago; the launcher's port is rank 0's to open.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..world).map(|rank| Started::new(rank, world, nodes, port, None, plan)).collect()
}

/// As [`start_on`], but the meeting place is in this process: whichever rank dies, the others can agree.
fn start_held(nodes: u32, world: u32, plan: &str) -> (MeetingPlace, Vec<Started>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let secret = Secret::from_text(SECRET).unwrap();
    let place = MeetingPlace::hold(listener, world, Some(secret)).unwrap();
    let start = |rank| Started::new(rank, world, nodes, address.port(), Some(address), plan);
    (place, (0..world).map(start).collect())
}

/// The files that shared memory with names would lie in.
fn named_memory() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    // Other programs of the machine come and go; ours would be named after the crate or the window.
    names.filter(|name| ["ep-", "ep_", "moexpress"].iter().any(|ours| name.contains(ours))).collect()
}

/// What a process has mapped: the files' names.
fn mapped(process: &Child) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.id())).unwrap();
    maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(str::to_owned).collect()
}

/// RoCE between two nodes on the devices that the environment names: those of the guest of `ci/softroce/run`, or
/// `EP_ROCE_DEVICES`.
pub(crate) fn roce() -> ep_roce::Roce {
    let named = std::env::var("EP_ROCE_DEVICES").ok();
    let named = named.or_else(|| Some(std::env::var("SOFTROCE_DEVICES").ok()?.replace(',', "/")));
    let named = named.expect("RDMA devices: SOFTROCE_DEVICES or EP_ROCE_DEVICES; see ci/softroce/run");
    ep_roce::Roce::new(ep_roce::Settings::new().devices(named.parse().expect("names of devices")))
}

fn work_verified(world: u32) {
    all_verified(start(world, "work"));
}

fn all_verified(mut ranks: Vec<Started>) {
    for rank in &ranks {
        let said = rank.hear();
        let rows: u64 = said.strip_prefix("verified ").and_then(|rows| rows.parse().ok()).expect(&said);
        assert!(rows > 0);
    }
    ranks.iter_mut().for_each(Started::succeeds);
}

#[test]
fn two_processes_work_in_both_modes() {
    work_verified(2);
}

#[test]
fn four_processes_work_in_both_modes() {
    work_verified(4);
}

#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn two_nodes_over_roce_of_two_processes_each_work_in_both_modes() {
    roce();
    all_verified(start_on(2, 4, "work"));
}

/// Its lanes break, its node leaves as a whole, and the other goes on.
#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn a_process_killed_on_one_of_two_nodes_over_roce_is_named_and_the_other_node_recovers() {
    roce();
    let mut ranks = kill_one(start_on(2, 4, "persist"), 3, Duration::from_secs(5));
    assert_eq!(ranks[2].hear(), "rank 2 was masked out by the other ranks");
    for rank in &mut ranks[..2] {
        let said = rank.hear();
        assert!(said.starts_with("verified "), "{said}");
        rank.succeeds();
    }
    ranks[2].succeeds();
}

/// Starts four, waits until they are at work, kills one; the others name it within a second.
fn kill(victim: usize) -> Vec<Started> {
    kill_one(start(4, "persist"), victim, Duration::from_secs(1))
}

fn kill_one(mut ranks: Vec<Started>, victim: usize, within: Duration) -> Vec<Started> {
    assert!(ranks.iter().all(|rank| rank.hear() == "at work"));
    thread::sleep(Duration::from_millis(20));
    ranks[victim].process.kill().unwrap();
    let killed = Instant::now();
    for (rank, started) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        assert_eq!(started.hear(), format!("lost {victim}"), "said by rank {rank}");
    }
    let took = killed.elapsed();
    assert!(took < within, "{took:?}");
    println!("named within {took:?}");
    ranks
}

#[test]
fn a_killed_process_is_named_within_a_second_and_the_others_recover() {
    let mut ranks = kill(3);
    for rank in &mut ranks[..3] {
        let said = rank.hear();
        assert!(said.starts_with("verified "), "{said}");
        rank.succeeds();
    }
}

#[test]
fn when_the_process_with_the_meeting_place_is_killed_the_others_say_so() {
    let mut ranks = kill(0);
    for rank in &mut ranks[1..] {
        assert_eq!(rank.hear(), "rank 0 is gone, while waiting for recovery from it");
        rank.succeeds();
    }
}

#[test]
fn nothing_stays_behind_when_all_are_killed() {
    let before = named_memory();
    let mut ranks = start(2, "persist");
    assert!(ranks.iter().all(|rank| rank.hear() == "at work"));
    for rank in &ranks {
        let mapped = mapped(&rank.process);
        assert_eq!(mapped.iter().filter(|name| *name == "/memfd:ep-window").count(), 2, "{mapped:?}");
        assert!(!mapped.iter().any(|name| name.starts_with("/dev/shm")), "{mapped:?}");
    }
    assert_eq!(named_memory(), before, "while they run");
    ranks.iter_mut().for_each(|rank| rank.process.kill().unwrap());
    ranks.iter_mut().for_each(|rank| drop(rank.process.wait()));
    assert_eq!(named_memory(), before);
}

#[test]
fn different_settings_are_refused_by_all() {
    let mut ranks = start(2, "differ");
    for rank in &mut ranks {
        let said = rank.hear();
        assert!(said.contains("hash of shape, topology and settings of rank "), "{said}");
        rank.succeeds();
    }
}
