//! Ranks that a test starts by hand: its program runs itself again as each rank, whose plan a variable names ([`super::plans`]).

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep_bootstrap::{MEETING_VARIABLE, MeetingPlace, SECRET_VARIABLE, Secret};

/// The variable that says what a rank is to do.
pub const PLAN: &str = "EP_TEST_PLAN";
/// Stands before what a rank says.
const MARK: &str = "rank says: ";
/// Of the jobs.
const SECRET: &str = "test";
/// The test that is the body of a rank: `#[ignore]`d, in a module `rank` of the test program.
const BODY: &str = "rank::a_rank_that_was_started";
/// More than anything takes that works.
const LONG: Duration = Duration::from_secs(180);

/// Says something to the test that has started this rank.
pub fn say(what: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone hears nothing.
    let _ = writeln!(out, "{MARK}{what}").and_then(|()| out.flush());
}

/// What ranks are started with.
#[derive(Clone, Debug)]
pub struct Start {
    /// Of the job, each with as many ranks.
    pub nodes: u32,
    /// Ranks of the job.
    pub world: u32,
    /// What they are to do.
    pub plan: String,
    /// More variables.
    pub variables: Vec<(String, String)>,
    /// The test that is the body of a rank.
    pub body: &'static str,
}

impl Start {
    /// Ranks of so many nodes.
    #[must_use]
    pub fn new(nodes: u32, world: u32, plan: &str) -> Self {
        Self { nodes, world, plan: plan.to_owned(), variables: Vec::new(), body: BODY }
    }

    /// With another body: an `#[ignore]`d test.
    #[must_use]
    pub const fn body(mut self, body: &'static str) -> Self {
        self.body = body;
        self
    }

    /// With a variable.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts all; rank 0 opens the meeting place.
    ///
    /// # Panics
    /// Where a process does not start.
    #[must_use]
    pub fn start(&self) -> Vec<Started> {
        // Free a moment ago; the launcher's port is rank 0's to open.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.expect("a free port").port();
        (0..self.world).map(|rank| self.rank(rank, port, None)).collect()
    }

    /// As [`Start::start`], but the meeting place is in this process: whichever rank dies, the others can agree.
    ///
    /// # Panics
    /// Where a process does not start.
    #[must_use]
    pub fn start_held(&self) -> (MeetingPlace, Vec<Started>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let secret = Secret::from_text(SECRET).expect("a secret");
        let place = MeetingPlace::hold(listener, self.world, Some(secret)).expect("a meeting place");
        (place, (0..self.world).map(|rank| self.rank(rank, address.port(), Some(address))).collect())
    }

    /// Starts one.
    ///
    /// # Panics
    /// Where it does not start.
    #[must_use]
    pub fn rank(&self, rank: u32, port: u16, held: Option<SocketAddr>) -> Started {
        let local_world = self.world / self.nodes;
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", self.body, "--nocapture", "--test-threads=1"]);
        command.env(PLAN, &self.plan).env(SECRET_VARIABLE, SECRET);
        command.envs(held.map(|address| (MEETING_VARIABLE, address.to_string())));
        let numbers = [
            ("RANK", rank),
            ("WORLD_SIZE", self.world),
            ("LOCAL_RANK", rank % local_world),
            ("LOCAL_WORLD_SIZE", local_world),
        ];
        command.envs(numbers.map(|(name, number)| (name, number.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.envs(self.variables.iter().cloned());
        Started::new(rank, &mut command)
    }
}

/// A rank that was started. Dropped, it is killed; when its test fails, all that it wrote is shown, with the time since its start.
#[derive(Debug)]
pub struct Started {
    /// Its number.
    pub rank: u32,
    /// Its process.
    pub process: Child,
    /// What it says.
    pub said: Receiver<String>,
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
    fn new(rank: u32, command: &mut Command) -> Self {
        let started = Instant::now();
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a rank that starts");
        let (says, said) = channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let (out, errors) = (process.stdout.take(), process.stderr.take());
        let note = move |written: &Mutex<Vec<String>>, line: &str| {
            let line = format!("{:7.3} s {line}", started.elapsed().as_secs_f64());
            written.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        };
        let (of_out, of_errors) = (Arc::clone(&written), Arc::clone(&written));
        let hear = thread::spawn(move || {
            for line in out.into_iter().flat_map(|out| BufReader::new(out).lines().map_while(Result::ok)) {
                note(&of_out, &line);
                // What the test harness says may stand before it on the line.
                if let Some((_, word)) = line.split_once(MARK) {
                    let _ = says.send(word.to_owned());
                }
            }
        });
        let keep = thread::spawn(move || {
            let lines = errors.into_iter().flat_map(|errors| BufReader::new(errors).lines().map_while(Result::ok));
            lines.for_each(|line| note(&of_errors, &line));
        });
        Self { rank, process, said, written, readers: vec![hear, keep] }
    }

    /// What it says next.
    ///
    /// # Panics
    /// Where it ends before, or says nothing for a minute.
    #[must_use]
    pub fn hear(&self) -> String {
        self.said.recv_timeout(LONG).expect("the rank says something before it ends")
    }

    /// Waits until it has ended well.
    ///
    /// # Panics
    /// Where it has not.
    pub fn succeeds(&mut self) {
        assert!(self.process.wait().expect("a process").success(), "rank {}", self.rank);
    }
}
