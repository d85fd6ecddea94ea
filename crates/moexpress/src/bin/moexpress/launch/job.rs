//! The running processes: waiting for them, passing signals on, ending all when one fails.

use std::io;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::output::{Printer, Stream};
use super::process::{Ending, Process};
use super::signals::{Signal, Signals};
use crate::failure::Failure;

/// How often the processes are looked after.
const PERIOD: Duration = Duration::from_millis(10);

/// Why all processes are to end.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Failed {
        rank: usize,
        ending: Ending,
    },
    Signalled(Signal),
    /// What reads the output of this command is gone.
    Unread,
}

impl Cause {
    fn failure(self) -> Failure {
        let (text, code) = match self {
            Self::Failed { rank, ending } => (format!("rank {rank} {ending}"), ending.code()),
            Self::Signalled(signal) => (format!("ended by {signal}"), signal.code()),
            Self::Unread => ("nobody reads the output any more".to_owned(), crate::failure::FAILED),
        };
        Failure { text, report: String::new(), code }
    }
}

/// All processes. Dropping it kills those that still run.
pub(super) struct Job {
    processes: Vec<Process>,
    grace: Duration,
    /// Whether the others go on when one fails.
    keep_going: bool,
}

impl Job {
    pub(super) const fn new(grace: Duration, keep_going: bool) -> Self {
        Self { processes: Vec::new(), grace, keep_going }
    }

    pub(super) fn start(&mut self, rank: u32, mut command: Command, printer: &Printer) -> io::Result<()> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (process, stdout, stderr) = Process::start(command)?;
        self.processes.push(process);
        printer.follow(rank, Stream::Out, stdout)?;
        printer.follow(rank, Stream::Err, stderr)
    }

    /// Returns when all processes have ended.
    pub(super) fn run(&mut self, signals: &mut Signals, printer: &Printer) -> Result<String, Failure> {
        let mut cause: Option<Cause> = None;
        let mut kill_at: Option<Instant> = None;
        loop {
            for signal in signals.pending() {
                // Who asks twice does not want to wait.
                if matches!(cause, Some(Cause::Signalled(_))) {
                    kill_at = Some(Instant::now());
                }
                cause.get_or_insert(Cause::Signalled(signal));
                kill_at.get_or_insert_with(|| Instant::now() + self.grace);
                self.processes.iter_mut().for_each(|process| process.signal(signal));
            }
            if cause.is_none() {
                let failed = if self.keep_going { None } else { self.first_failure() };
                cause = failed.or_else(|| printer.is_unread().then_some(Cause::Unread));
                if cause.is_some() {
                    kill_at = Some(Instant::now() + self.grace);
                    self.processes.iter_mut().for_each(Process::end);
                }
            }
            if self.processes.iter_mut().all(|process| process.ending().is_some()) {
                break;
            }
            if kill_at.is_some_and(|at| at <= Instant::now()) {
                self.processes.iter_mut().for_each(Process::kill);
            }
            thread::sleep(PERIOD);
        }
        // The processes may have left others behind, which hold their output open.
        self.kill_all();
        cause.or_else(|| self.first_failure()).map_or_else(|| Ok(String::new()), |cause| Err(cause.failure()))
    }

    fn first_failure(&mut self) -> Option<Cause> {
        let endings = self.processes.iter_mut().map(Process::ending).enumerate();
        let mut failures =
            endings.filter_map(|(rank, ending)| Some((rank, ending.filter(|ending| !ending.is_success())?)));
        failures.next().map(|(rank, ending)| Cause::Failed { rank, ending })
    }

    /// Kills whatever still runs.
    pub(super) fn kill_all(&mut self) {
        self.processes.iter_mut().for_each(Process::kill);
        self.processes.iter_mut().for_each(Process::reap);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill_all();
    }
}
