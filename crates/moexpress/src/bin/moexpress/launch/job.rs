//! The running processes: waiting for them, passing signals on, ending all when one fails.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use ep_bootstrap::{MeetingPlace, listed};
use ep_core::Rank;

use super::endings::{Arrival, Endings};
use super::guard::Guard;
use super::output::{Printer, READER, READER_OF_LAST_WORDS, Stream};
use super::process::Process;
use super::signals::{Home, Signal, Signals};
use crate::failure::Failure;
use crate::show::complain;

/// How often signals and readers are looked for. The end of a process is noticed at once.
const PERIOD: Duration = Duration::from_millis(10);

/// Why all processes are to end.
#[derive(Debug)]
enum Cause {
    Failed(Arrival),
    Signalled(Signal),
    /// What reads the output of this command is gone, or takes no more.
    Unread(String),
}

impl Cause {
    fn failure(self, endings: &Endings) -> Failure {
        let (text, code) = match self {
            Self::Failed(Arrival { rank, ending, .. }) => {
                let how = if ending.is_killed() { "was ended by" } else { "ended with" };
                (format!("rank {rank} {how} {ending}"), ending.code())
            }
            Self::Signalled(signal) => (format!("ended by {signal}"), signal.code()),
            Self::Unread(why) => (why, crate::failure::FAILED),
        };
        Failure { text: format!("{text}; {}", endings.list()), report: String::new(), code }
    }
}

/// All processes. Dropping it kills those that still run.
pub(super) struct Job {
    processes: Vec<Process>,
    grace: Duration,
    /// Whether the others go on when one fails.
    keep_going: bool,
    endings: Endings,
    /// A signal was passed on.
    signalled: bool,
    /// What threads see that wait for ends.
    arrivals: (Sender<Arrival>, Receiver<Arrival>),
    guard: Guard,
}

impl Job {
    pub(super) fn new(grace: Duration, keep_going: bool) -> Result<Self, Failure> {
        let guard = Guard::start(grace).map_err(|error| {
            Failure::failed(format_args!("cannot start what ends the job with this command: {error}"))
        })?;
        Ok(Self {
            processes: Vec::new(),
            grace,
            keep_going,
            endings: Endings::default(),
            signalled: false,
            arrivals: mpsc::channel(),
            guard,
        })
    }

    pub(super) fn start(&mut self, rank: u32, mut command: Command, printer: &mut Printer) -> io::Result<()> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let home = Home::new()?;
        // Before the process starts: this command may be killed at any time, and nobody else would know of it.
        self.guard.watch(home.id())?;
        let (process, stdout, stderr) = Process::start(command, home)?;
        let (ended, rank) = (self.arrivals.0.clone(), Rank(rank));
        self.processes.push(process);
        let process = &self.processes[rank.index()];
        process.watch(move |ending| {
            // Nobody listens any more once all are killed.
            let _ = ended.send(Arrival { rank, ending, at: Instant::now() });
        })?;
        printer.follow(rank.0, Stream::Out, OwnedFd::from(stdout))?;
        printer.follow(rank.0, Stream::Err, OwnedFd::from(stderr))
    }

    /// Returns when all processes have ended. Those that wait at the meeting place for one that has hear of it.
    pub(super) fn run(
        &mut self,
        signals: &mut Signals,
        printer: &Printer,
        place: &MeetingPlace,
    ) -> Result<String, Failure> {
        let mut cause: Option<Cause> = None;
        let mut kill_at: Option<Instant> = None;
        while self.endings.len() < self.processes.len() {
            for signal in signals.pending() {
                // Who asks twice does not want to wait.
                if matches!(cause, Some(Cause::Signalled(_))) {
                    kill_at = Some(Instant::now());
                }
                cause.get_or_insert(Cause::Signalled(signal));
                kill_at.get_or_insert_with(|| Instant::now() + self.grace);
                self.pass_on(signal);
            }
            if cause.is_none() {
                let failed = (!self.keep_going).then(|| self.endings.settled_failure(Instant::now())).flatten();
                cause = failed.map(Cause::Failed).or_else(|| printer.unread().map(Cause::Unread));
                if cause.is_some() {
                    kill_at = Some(Instant::now() + self.grace);
                    self.endings.told();
                    self.processes.iter().for_each(Process::end);
                }
            }
            if kill_at.is_some_and(|at| at <= Instant::now()) {
                self.processes.iter().for_each(Process::kill);
            }
            if let Ok(arrival) = self.arrivals.1.recv_timeout(PERIOD) {
                // Where all are about to end, none of them is to complain of another.
                if self.keep_going || arrival.ending.is_success() {
                    place.has_ended(arrival.rank);
                }
                self.endings.push(arrival);
            }
        }
        // The processes may have left others behind, which hold their output open.
        self.kill_all();
        let cause = cause.or_else(|| self.endings.first_failure().map(Cause::Failed));
        cause.map_or_else(|| Ok(String::new()), |cause| Err(cause.failure(&self.endings)))
    }

    /// Tells all processes, and whoever reads this, of a signal.
    fn pass_on(&mut self, signal: Signal) {
        self.endings.told();
        self.signalled = true;
        let running = self.endings.running(self.processes.len());
        let grace = self.grace;
        complain(&format!(
            "{signal}: passed on to {}; what runs after {grace:?}, or when it comes again, is killed",
            listed(&running)
        ));
        self.processes.iter().for_each(|process| process.signal(signal));
    }

    /// How long its last lines may wait for their reader.
    pub(super) const fn patience(&self) -> Duration {
        if self.signalled { READER_OF_LAST_WORDS } else { READER }
    }

    /// What to say of a job whose last lines nobody could read.
    pub(super) fn unread(&self, why: String) -> Failure {
        Cause::Unread(why).failure(&self.endings)
    }

    /// Kills whatever still runs.
    pub(super) fn kill_all(&mut self) {
        self.processes.iter().for_each(Process::kill);
        self.guard.dismiss();
        self.processes.iter_mut().for_each(Process::reap);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill_all();
    }
}
