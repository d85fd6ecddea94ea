//! In the test program: starts the processes of a case's ranks and carries their results.

use std::collections::HashMap;
use std::io::BufReader;
use std::mem;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::rank::RANK;
use super::wire::{FromRank, Outcome, Returns, ToRank, receive, send};

/// Groups of processes that have no case. Dropped, they are killed.
#[derive(Default)]
pub(crate) struct Pool(Mutex<Vec<Group>>);

impl Pool {
    /// Runs a case in processes; they may take so long.
    pub(crate) fn run(&self, case: &str, limit: Duration) -> Result<(), String> {
        let idle = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut group = idle.unwrap_or_else(Group::new);
        group.run(case, limit)?;
        // After a failure nothing is known of the processes: they are not used again.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(group);
        Ok(())
    }
}

/// A process of a rank. Dropped, it is killed.
struct Process {
    child: Child,
    to: ChildStdin,
    /// How many processes this rank had before.
    life: u32,
    has_ended: bool,
    /// The case has ended well there.
    is_through: bool,
}

impl Process {
    fn start(rank: u32, life: u32, events: &Sender<Event>) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("the process of rank {rank} did not start: {error}");
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.env(RANK, rank.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("the process of rank {rank} has no pipes"));
        };
        let events = events.clone();
        thread::spawn(move || {
            let mut from = BufReader::new(from);
            loop {
                let said = match receive(&mut from) {
                    Ok(Some(message)) => Said::Message(message),
                    Ok(None) => Said::End,
                    Err(error) => Said::Nonsense(error.to_string()),
                };
                let is_last = !matches!(said, Said::Message(_));
                if events.send(Event { rank, life, said }).is_err() || is_last {
                    return;
                }
            }
        });
        Ok(Self { child, to, life, has_ended: false, is_through: false })
    }

    /// To a process that has ended it says nothing; its end is heard.
    fn tell(&mut self, message: &ToRank) {
        let _ = send(&mut self.to, message);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

enum Said {
    Message(FromRank),
    /// It has closed its pipe: it ends.
    End,
    Nonsense(String),
}

struct Event {
    rank: u32,
    life: u32,
    said: Said,
}

/// A run that has begun.
struct Run {
    may_crash: Vec<u32>,
    exits: Vec<u32>,
    judge: Option<u32>,
    /// By rank; a rank that an incident has ended gives `Ok(None)`.
    returned: Vec<Option<Result<Option<Vec<u8>>, String>>>,
}

/// The processes of a case, by rank.
struct Group {
    processes: Vec<Process>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    case: String,
    /// What the runs of the case gave, in order.
    past: Vec<(u64, Outcome)>,
    runs: HashMap<u64, Run>,
}

impl Group {
    fn new() -> Self {
        let (sender, events) = channel();
        let (processes, past, runs) = (Vec::new(), Vec::new(), HashMap::new());
        Self { processes, events, sender, case: String::new(), past, runs }
    }

    fn run(&mut self, case: &str, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        case.clone_into(&mut self.case);
        self.past.clear();
        self.runs.clear();
        for process in &mut self.processes {
            process.is_through = false;
            process.tell(&ToRank::Case { name: case.to_owned(), past: Vec::new() });
        }
        self.provide(1)?;
        while !self.processes.iter().all(|process| process.is_through) {
            let event = match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return Err(self.late(limit)),
                // It cannot be: this group holds a sender.
                Err(RecvTimeoutError::Disconnected) => return Err("no process is left".into()),
            };
            // What a process said whose successor runs is of a run that has ended.
            if self.processes.get(event.rank as usize).is_some_and(|process| process.life == event.life) {
                self.hear(event.rank, event.said)?;
            }
        }
        Ok(())
    }

    fn hear(&mut self, rank: u32, said: Said) -> Result<(), String> {
        match said {
            Said::Message(FromRank::Begun { run, ranks, port, may_crash, exits, judge }) => {
                self.runs.insert(run, Run { may_crash, exits, judge, returned: vec![None; ranks as usize] });
                self.provide(ranks)?;
                self.tell_all(&ToRank::Meet { run, port });
                Ok(())
            }
            Said::Message(FromRank::Returned { run, result }) => self.returned(run, rank, result.map(Some)),
            Said::Message(FromRank::Judged { run, verdict }) => {
                self.finished(run, verdict.map(|said| vec![Some(said)]))
            }
            Said::Message(FromRank::Verdict { result }) => {
                self.processes[rank as usize].is_through = true;
                result
            }
            Said::End => self.ended(rank),
            Said::Nonsense(error) => Err(format!("the process of rank {rank} wrote what nobody understands: {error}")),
        }
    }

    /// Sees to it that the first `ranks` ranks have processes.
    fn provide(&mut self, ranks: u32) -> Result<(), String> {
        for rank in self.processes.len() as u32..ranks {
            let process = self.start(rank, 0)?;
            self.processes.push(process);
        }
        Ok(())
    }

    /// A process that goes through the case up to here.
    fn start(&self, rank: u32, life: u32) -> Result<Process, String> {
        let mut process = Process::start(rank, life, &self.sender)?;
        process.tell(&ToRank::Case { name: self.case.clone(), past: self.past.clone() });
        Ok(process)
    }

    fn tell_all(&mut self, message: &ToRank) {
        self.processes.iter_mut().for_each(|process| process.tell(message));
    }

    fn returned(&mut self, run: u64, rank: u32, result: Result<Option<Vec<u8>>, String>) -> Result<(), String> {
        let unknown = || format!("rank {rank} returned from run {run:x}, which is not on");
        let Run { returned, judge, .. } = self.runs.get_mut(&run).ok_or_else(unknown)?;
        *returned.get_mut(rank as usize).ok_or_else(unknown)? = Some(result);
        if returned.iter().any(Option::is_none) {
            return Ok(());
        }
        let results: Vec<_> = returned.iter_mut().flatten().map(|result| mem::replace(result, Ok(None))).collect();
        // What failed at one rank, the others often see as a rank that is gone: whoever reads it wants both.
        let errors: Vec<&str> = results.iter().filter_map(|result| result.as_ref().err()).map(String::as_str).collect();
        if !errors.is_empty() {
            let errors = errors.join("; ");
            return self.finished(run, Err(errors));
        }
        let all: Returns = results.into_iter().flatten().collect();
        match *judge {
            Some(judge) => {
                self.processes[judge as usize].tell(&ToRank::Judge { run, returned: all });
                Ok(())
            }
            None => self.finished(run, Ok(all)),
        }
    }

    /// Tells all ranks what a run gave.
    fn finished(&mut self, run: u64, outcome: Outcome) -> Result<(), String> {
        let unknown = || format!("run {run:x} has ended, which is not on");
        let Run { exits, .. } = self.runs.remove(&run).ok_or_else(unknown)?;
        self.past.push((run, outcome.clone()));
        self.tell_all(&ToRank::Ended { run, outcome });
        // Whom an incident has ended, or is about to, gets a successor for the runs that follow.
        for rank in 0..self.processes.len() as u32 {
            let process = &self.processes[rank as usize];
            if process.has_ended || exits.contains(&rank) {
                self.processes[rank as usize] = self.start(rank, process.life + 1)?;
            }
        }
        Ok(())
    }

    /// The process of `rank` has ended: by an incident, or the case has failed.
    fn ended(&mut self, rank: u32) -> Result<(), String> {
        let process = &mut self.processes[rank as usize];
        process.has_ended = true;
        let took_part = self.runs.iter().filter(|(_, run)| run.returned.len() > rank as usize);
        let (may, must_not): (Vec<_>, Vec<_>) =
            took_part.partition(|(_, run)| run.exits.contains(&rank) || run.may_crash.contains(&rank));
        if may.is_empty() || !must_not.is_empty() {
            let status = process.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
            return Err(format!("the process of rank {rank} ended, which nothing asked for: {status}"));
        }
        let unfinished = may.into_iter().filter(|(_, run)| run.returned[rank as usize].is_none());
        let unfinished: Vec<u64> = unfinished.map(|(&number, _)| number).collect();
        unfinished.into_iter().try_for_each(|run| self.returned(run, rank, Ok(None)))
    }

    fn late(&self, limit: Duration) -> String {
        let waiting = |(rank, _): &(usize, &Process)| {
            self.runs.values().any(|run| run.returned.get(*rank).is_some_and(Option::is_none))
        };
        let ranks: Vec<String> =
            self.processes.iter().enumerate().filter(waiting).map(|(rank, _)| rank.to_string()).collect();
        format!("not done within {limit:?}; at work: rank {}", ranks.join(", "))
    }
}
