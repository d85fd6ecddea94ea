//! In the process of a rank: the case, and its part of every run.

use std::collections::{HashMap, hash_map::DefaultHasher};
use std::hash::{Hash as _, Hasher as _};
use std::io::{self, Stdout, stdin, stdout};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{ExitCode, exit};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use ep_core::Rank;
use ep_core::incident::Incident;

use super::wire::{FromRank, Outcome, Returns, ToRank, pack, receive, send, unpack};
use super::{InProcesses, Place, Processes};
use crate::any::AnyOf;
use crate::backend::{Setup, Travels};
use crate::cases;

/// The variable that makes the test program a rank, and says which.
pub(super) const RANK: &str = "EP_SUITE_RANK";

/// Whether this process is one of a rank.
pub(crate) fn is_rank() -> bool {
    std::env::var_os(RANK).is_some()
}

/// What has been heard of the case's runs.
#[derive(Default)]
struct Heard {
    /// Ports at which runs meet.
    ports: HashMap<u64, u16>,
    /// What this rank is to judge.
    returned: HashMap<u64, Returns>,
    /// What ended runs gave.
    ended: HashMap<u64, Outcome>,
    /// Runs begun here, by their communicators.
    begun: HashMap<u64, u64>,
}

/// The rank's side of its pipes.
pub(crate) struct Session {
    rank: Rank,
    heard: Mutex<Heard>,
    news: Condvar,
    out: Mutex<Stdout>,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, message: &FromRank) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // Without the hub there is nobody to work for.
        if send(&mut *out, message).is_err() {
            exit(1);
        }
    }

    /// Hears the hub until it is gone.
    fn listen(&self, cases: &Sender<String>) {
        let mut from = io::BufReader::new(stdin());
        while let Ok(Some(message)) = receive(&mut from) {
            let mut heard = self.lock();
            match message {
                ToRank::Case { name, past } => {
                    *heard = Heard { ended: past.into_iter().collect(), ..Heard::default() };
                    let _ = cases.send(name);
                }
                ToRank::Meet { run, port } => drop(heard.ports.insert(run, port)),
                ToRank::Judge { run, returned } => drop(heard.returned.insert(run, returned)),
                ToRank::Ended { run, outcome } => drop(heard.ended.insert(run, outcome)),
            }
            self.news.notify_all();
        }
        // The test program is gone: whatever runs here is of no use any more.
        exit(1);
    }

    fn await_news<T>(&self, mut look: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let mut heard = self.lock();
        loop {
            if let Some(found) = look(&mut heard) {
                return found;
            }
            heard = self.news.wait(heard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The number of a run, the same in all processes: cases may run several communicators at the same time.
    fn number(&self, setup: &Setup) -> u64 {
        let mut hasher = DefaultHasher::new();
        format!("{setup:?}").hash(&mut hasher);
        let communicator = hasher.finish();
        let mut heard = self.lock();
        let before = heard.begun.entry(communicator).or_default();
        *before += 1;
        communicator.wrapping_add(*before)
    }

    /// Does this rank's part of a run, if it has one, and gives what all returned. What `work` returns beside its value is
    /// held until all are through.
    pub(super) fn run<T: Travels, S>(
        &self,
        setup: &Setup,
        work: impl FnOnce(Place) -> Result<(T, S), String>,
    ) -> Result<Vec<Option<T>>, String> {
        let run = self.number(setup);
        let stay = self.take_part(run, setup, None, work)?;
        let outcome = self.outcome(run);
        drop(stay);
        all(outcome?)
    }

    /// The same, where one process, that of a rank that no incident ends, has `judge` look at what all returned. All get what it gives.
    pub(super) fn run_judged<T: Travels, S, V: Travels>(
        &self,
        setup: &Setup,
        work: impl FnOnce(Place) -> Result<(T, S), String>,
        judge: impl FnOnce(Vec<Option<T>>) -> Result<V, String>,
    ) -> Result<V, String> {
        let (may_crash, exits) = ends(&setup.incidents);
        let whole = setup.topology.all().find(|rank| !may_crash.contains(&rank.0) && !exits.contains(&rank.0));
        let Some(who) = whole else { return judge(self.run(setup, work)?) };
        let run = self.number(setup);
        let stay = self.take_part(run, setup, Some(who), work)?;
        if self.rank == who {
            let returned = self.await_news(|heard| match heard.returned.remove(&run) {
                Some(returned) => Some(Some(returned)),
                None => heard.ended.contains_key(&run).then_some(None),
            });
            if let Some(returned) = returned {
                let verdict = all(returned).and_then(judge).and_then(|verdict| pack(&verdict));
                self.tell(&FromRank::Judged { run, verdict });
            }
        }
        let outcome = self.outcome(run);
        drop(stay);
        let said = outcome?.pop().flatten().ok_or("a judge that said nothing")?;
        unpack(&said)
    }

    /// What a run gave, once it has ended. A run is asked for once.
    fn outcome(&self, run: u64) -> Outcome {
        self.await_news(|heard| heard.ended.remove(&run))
    }

    /// Does this rank's part of a run, if it has one that is not past.
    fn take_part<T: Travels, S>(
        &self,
        run: u64,
        setup: &Setup,
        judge: Option<Rank>,
        work: impl FnOnce(Place) -> Result<(T, S), String>,
    ) -> Result<Option<S>, String> {
        let (rank, ranks) = (self.rank, setup.topology.ranks());
        if rank.0 >= ranks || self.lock().ended.contains_key(&run) {
            return Ok(None);
        }
        let (port, listener) = if rank == Rank(0) {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
            let port = listener.local_addr().map_err(|error| error.to_string())?.port();
            let (may_crash, exits) = ends(&setup.incidents);
            self.tell(&FromRank::Begun { run, ranks, port, may_crash, exits, judge: judge.map(|rank| rank.0) });
            (port, Some(listener))
        } else {
            (self.await_news(|heard| heard.ports.get(&run).copied()), None)
        };
        let address = (Ipv4Addr::LOCALHOST, port).into();
        let (result, stay) = match work(Place { rank, ranks, address, listener }) {
            Ok((value, stay)) => (pack(&value), Some(stay)),
            Err(error) => (Err(format!("rank {rank}: {error}")), None),
        };
        self.tell(&FromRank::Returned { run, result });
        if setup.incidents.contains(&Incident::Exit { rank }) {
            exit(0);
        }
        Ok(stay)
    }
}

fn all<T: Travels>(returned: Returns) -> Result<Vec<Option<T>>, String> {
    returned.into_iter().map(|bytes| bytes.map(|bytes| unpack(&bytes)).transpose()).collect()
}

/// Ranks whose processes incidents may crash, and those that exit.
fn ends(incidents: &[Incident]) -> (Vec<u32>, Vec<u32>) {
    let (mut may_crash, mut exits) = (Vec::new(), Vec::new());
    for incident in incidents {
        match *incident {
            Incident::Crash { rank, .. } => may_crash.push(rank.0),
            Incident::Exit { rank } => exits.push(rank.0),
            _ => {}
        }
    }
    (may_crash, exits)
}

/// Goes through the cases that the hub names, until it is gone.
pub(crate) fn serve<P: Processes>(backend: P) -> ExitCode {
    let Some(rank) = std::env::var(RANK).ok().and_then(|rank| rank.parse().ok()) else {
        eprintln!("{RANK} does not name a rank");
        return ExitCode::FAILURE;
    };
    let session = Arc::new(Session {
        rank: Rank(rank),
        heard: Mutex::default(),
        news: Condvar::new(),
        out: Mutex::new(stdout()),
    });
    let (named, names) = channel();
    let listener = Arc::clone(&session);
    thread::spawn(move || listener.listen(&named));
    let backend = AnyOf::new(InProcesses { backend, session: Some(Arc::clone(&session)) });
    for name in names {
        let case = cases::all().into_iter().find(|case| case.name == name);
        let result = case.map_or_else(|| Err(format!("no case is called {name}")), |case| (case.body)(&backend));
        session.tell(&FromRank::Verdict { result });
    }
    ExitCode::SUCCESS
}
