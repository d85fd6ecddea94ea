//! A host of the twin: the functions of a [`Table`] over a [`Machine`], for the thread that made it.
//!
//! Every call is decoded: handles, addresses, lengths and kinds are looked up. What the documents do not allow, and a call in the wrong order,
//! is refused with the code that they name, and remembered as the *fault* of the host, beside the rules that kernels break
//! ([`Session::fault`]). A call may be told to fail ([`Session::fail`]). The device is shared by all ranks of the machine, one a rank, and
//! moves while somebody asks for an event. The clock is the machine's.
//!
//! A process whose calls come from several threads has a twin of the process instead ([`Host::install_for_process`]): they take turns with it.

mod calls;
mod ipc;
mod network;
mod objects;
mod streams;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Machine, TwinError};
use crate::driver::{Code, INVALID_PARAM, Table};
use objects::Objects;

/// Turns of the scheduler for each look at an event.
const TURNS_A_LOOK: u64 = 2_000;
/// Ticks that pass for each look at the clock of an idle machine: 50 us.
const IDLE_TICKS: u64 = 2_500;

thread_local! {
    static HOST: RefCell<Option<Host>> = const { RefCell::new(None) };
}

/// The twin of the threads that have none of their own.
static OF_PROCESS: Mutex<Option<Host>> = Mutex::new(None);

fn of_process() -> MutexGuard<'static, Option<Host>> {
    OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the twin of this thread, or else that of the process. None where there is neither, or the thread is asking it already.
fn here<T>(what: impl FnOnce(&mut Host) -> T) -> Option<T> {
    let mut what = Some(what);
    // What outlives a thread's twin is answered, too.
    let own = HOST.try_with(|host| {
        let mut host = host.try_borrow_mut().ok()?;
        let host = host.as_mut()?;
        Some(what.take()?(host))
    });
    match own {
        Ok(Some(answered)) => Some(answered),
        _ => Some(what?(of_process().as_mut()?)),
    }
}

/// What a thread's twin is.
pub struct Host {
    machine: Machine,
    /// What devices call themselves; ends with zero.
    soc: Vec<u8>,
    objects: Objects,
    /// The first call that was wrong, or the rule that a kernel broke.
    fault: Option<String>,
    /// By function: calls that may still pass, and the code of the one behind them.
    failures: BTreeMap<&'static str, (u64, Code)>,
    calls: BTreeMap<&'static str, u64>,
    /// Whether the library hears of a device whose cores have stopped.
    has_heartbeat: bool,
    /// Whether windows are shared with other processes, each with a twin of its own.
    is_shared: bool,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("machine", &self.machine).field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl Host {
    /// Makes a machine the twin of this thread, until the session is dropped. Devices are those of its ranks, and call themselves `soc`.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where the thread has a twin already.
    pub fn install(machine: Machine, soc: &str) -> Result<Session, TwinError> {
        HOST.with_borrow_mut(|host| Self::put(host, machine, soc, "this thread"))?;
        Ok(Session { is_of_process: false, _here: std::marker::PhantomData })
    }

    /// Makes a machine the twin of all threads that have none of their own, as long as the process lasts.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where the process has a twin already.
    pub fn install_for_process(machine: Machine, soc: &str) -> Result<Session, TwinError> {
        Self::put(&mut of_process(), machine, soc, "this process")?;
        Ok(Session { is_of_process: true, _here: std::marker::PhantomData })
    }

    /// A session of the twin of the process, if there is one.
    pub fn of_process() -> Option<Session> {
        of_process().as_ref().map(|_| Session { is_of_process: true, _here: std::marker::PhantomData })
    }

    fn put(place: &mut Option<Self>, mut machine: Machine, soc: &str, whose: &str) -> Result<(), TwinError> {
        if place.is_some() {
            return Err(TwinError::Invalid(format!("twins of {whose} is 1, allowed: one at a time")));
        }
        machine.isolate();
        let objects = Objects::new(machine.ranks());
        *place = Some(Self {
            machine,
            soc: [soc.as_bytes(), &[0]].concat(),
            objects,
            fault: None,
            failures: BTreeMap::new(),
            calls: BTreeMap::new(),
            has_heartbeat: true,
            is_shared: false,
        });
        Ok(())
    }

    /// Notes what was wrong with a call, and answers it.
    fn refuse(&mut self, call: &'static str, code: Code, what: impl fmt::Display) -> Code {
        self.fault.get_or_insert_with(|| format!("calls: {call}: {what}"));
        code
    }

    /// The code of a failure that is due.
    fn due(&mut self, call: &'static str) -> Option<Code> {
        *self.calls.entry(call).or_default() += 1;
        let (left, code) = self.failures.get_mut(call)?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let code = *code;
        self.failures.remove(call);
        Some(code)
    }
}

/// Answers a call of a thread that has a twin. `answer` gives the code.
fn answer(call: &'static str, answer: impl FnOnce(&mut Host) -> Code) -> Code {
    let answered = here(|host| match host.due(call) {
        Some(code) => code,
        None => answer(host),
    });
    answered.unwrap_or(INVALID_PARAM)
}

/// The twin of a thread, or of the process. All that was made of it should be gone before.
#[derive(Debug)]
pub struct Session {
    is_of_process: bool,
    /// It is the thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl Session {
    fn with<T>(&self, what: impl FnOnce(&mut Host) -> T) -> T {
        let last = "a session lasts as long as its host";
        if self.is_of_process {
            return of_process().as_mut().map_or_else(|| unreachable!("{last}"), what);
        }
        HOST.with_borrow_mut(|host| host.as_mut().map_or_else(|| unreachable!("{last}"), what))
    }

    /// Where the host finds `bytes` of a device's memory, between runs. None where they are of no block. What it finds there is the memory itself,
    /// as long as that is not given back.
    pub fn lies_at(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        self.with(|host| host.objects.block(address, bytes).and_then(|_| host.machine.lies_at(address, bytes)))
    }

    /// The functions that drive it.
    pub const fn table(&self) -> Table {
        calls::TABLE
    }

    /// The first call that was wrong, or the rule that a kernel broke; none where there was none.
    pub fn fault(&self) -> Option<String> {
        self.with(|host| host.fault.clone())
    }

    /// Lets a function fail with a code, after so many calls of it that pass.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a function that the table does not have.
    pub fn fail(&self, function: &str, after: u64, code: i32) -> Result<(), TwinError> {
        let known = self.table().functions().into_iter().find(|(name, _)| *name == function);
        let (name, _) =
            known.ok_or_else(|| TwinError::Invalid(format!("function is {function}, allowed: one of the table")))?;
        self.with(|host| host.failures.insert(name, (after, code)));
        Ok(())
    }

    /// Calls of a function so far.
    pub fn calls(&self, function: &str) -> u64 {
        self.with(|host| host.calls.get(function).copied().unwrap_or(0))
    }

    /// What was made and not given back: blocks of memory, streams, events.
    pub fn left(&self) -> [usize; 3] {
        self.with(|host| host.objects.left())
    }

    /// What may befall a rank, on the machine.
    ///
    /// # Errors
    /// Those of the machine.
    pub fn befall(&self, what: impl FnOnce(&mut Machine) -> Result<(), TwinError>) -> Result<(), TwinError> {
        self.with(|host| what(&mut host.machine))
    }

    /// From now on nobody hears of a device whose cores have stopped: what it was given is never done.
    pub fn silence(&self) {
        self.with(|host| host.has_heartbeat = false);
    }

    /// From now on memory for peers may be shared with other processes, each of which has a twin of its own with the devices of all ranks, of which
    /// it runs one. Time is the system's: a process that is stopped is late.
    pub fn share(&self) {
        self.with(|host| {
            host.is_shared = true;
            host.machine.share();
        });
    }

    /// Copies that something has befallen on their way.
    pub fn befallen(&self) -> u64 {
        self.with(|host| host.machine.befallen())
    }

    /// Whether a rank's cores are suspended.
    pub fn is_suspended(&self, rank: u32) -> bool {
        self.with(|host| host.machine.is_suspended(rank).unwrap_or(false))
    }

    /// Whether a rank's cores have stopped for ever.
    pub fn has_crashed(&self, rank: u32) -> bool {
        self.with(|host| host.machine.has_crashed(rank).unwrap_or(false))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_of_process {
            HOST.with_borrow_mut(|host| *host = None);
        }
    }
}
