//! A member's end of its connection: a thread that reads replies into an inbox, and callers that wait there.

use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep_core::{Rank, RankSet};

use crate::error::{Call, Error};
use crate::secret::{Seal, Session, Side, digest};
use crate::wire::{Body, Frames, MAX_MESSAGE, Malformed, Reply, Request, TAG, VERSION, decode};

/// How much longer than its own deadline a caller waits for the meeting place to say who is missing: a tenth of the time it
/// had, within these.
const GRACE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// The longest that anybody waits. Keeps arithmetic on clocks from overflowing.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The wait of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) call: Call,
    pub(super) start: Instant,
    pub(super) deadline: Instant,
    /// When it ends if the meeting place says nothing.
    end: Instant,
}

impl Wait {
    pub(super) fn new(call: Call, within: Duration) -> Self {
        let (start, within) = (Instant::now(), within.min(LONGEST));
        let deadline = start + within;
        Self { call, start, deadline, end: deadline + (within / 10).clamp(GRACE[0], GRACE[1]) }
    }

    /// Nanoseconds that are left.
    pub(super) fn left(&self) -> u64 {
        let left = self.deadline.saturating_duration_since(Instant::now());
        u64::try_from(left.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What has arrived and not been taken.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) joined: Option<Reply>,
    pub(super) met: Option<Reply>,
    /// Answers to agreements that somebody still waits for, by call.
    pub(super) agreed: Vec<(u32, Option<Reply>)>,
    lost: RankSet,
    /// Why the connection ended, if it has.
    closed: Option<String>,
}

impl Inbox {
    fn put(&mut self, reply: Reply) {
        match reply {
            Reply::Joined | Reply::NotJoined(_) => self.joined = Some(reply),
            Reply::Met(_) | Reply::NotMet(_) => self.met = Some(reply),
            Reply::Agreed { call, .. } | Reply::NotAgreed { call, .. } => {
                // Nobody waits for an agreement whose caller left.
                if let Some((_, place)) = self.agreed.iter_mut().find(|(waiting, _)| *waiting == call) {
                    *place = Some(reply);
                }
            }
            Reply::Lost { rank } => self.lost.insert(Rank(rank)),
        }
    }
}

/// The connection, shared by callers and the reading thread.
pub(super) struct Link {
    address: String,
    /// The rank whose process the meeting place is in.
    host: Option<Rank>,
    /// Held while a message is written.
    seal: Mutex<Seal>,
    /// Read by the thread, written by callers, ended by either: one descriptor for all.
    stream: TcpStream,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

/// A link and its thread. Dropping it closes the connection.
pub(super) struct Links {
    link: Arc<Link>,
    reader: Option<JoinHandle<()>>,
}

impl Link {
    /// Takes over a connection on which both sides have proved themselves.
    pub(super) fn open(
        stream: TcpStream,
        session: &Session,
        address: String,
        host: Option<Rank>,
    ) -> Result<Links, Error> {
        let gone =
            |error: std::io::Error| Error::Gone { call: Call::Join, address: address.clone(), why: error.to_string() };
        let incoming = session.seal(Side::Meeting, VERSION);
        let link = Arc::new(Self {
            address: address.clone(),
            host,
            seal: Mutex::new(session.seal(Side::Member, VERSION)),
            stream,
            inbox: Mutex::default(),
            arrived: Condvar::new(),
        });
        let thread = thread::Builder::new().name("control plane".to_owned());
        let shared = Arc::clone(&link);
        let reader = thread.spawn(move || shared.read(incoming)).map_err(gone)?;
        Ok(Links { link, reader: Some(reader) })
    }

    /// Reads replies until the connection ends.
    fn read(&self, mut seal: Seal) {
        let mut stream = &self.stream;
        let mut frames = Frames::default();
        let mut chunk = vec![0; 64 << 10];
        let why = loop {
            match stream.read(&mut chunk) {
                Ok(0) => break "it closed the connection".to_owned(),
                Ok(bytes) => frames.push(&chunk[..bytes]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => break error.to_string(),
            }
            if let Err(malformed) = self.take(&mut frames, &mut seal) {
                break format!("it sent {malformed}");
            }
        };
        self.close(&why);
    }

    fn take(&self, frames: &mut Frames, seal: &mut Seal) -> Result<(), Malformed> {
        // An answer holds up to MAX_MESSAGE of contributions, counted with their overhead.
        while let Some(frame) = frames.next(TAG + MAX_MESSAGE)? {
            let (tag, bytes) = frame.split_first_chunk::<TAG>().ok_or(Malformed::Tag)?;
            if !seal.verifies(&digest(bytes), tag) {
                return Err(Malformed::Tag);
            }
            let reply = decode(bytes)?;
            self.inbox().put(reply);
            self.arrived.notify_all();
        }
        Ok(())
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Nobody panics while holding it; if somebody did, what has arrived is still true.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank whose process the meeting place is in.
    pub(super) const fn host(&self) -> Option<Rank> {
        self.host
    }

    pub(super) fn lost(&self) -> RankSet {
        self.inbox().lost.clone()
    }

    /// Ends the connection. The first reason counts.
    pub(super) fn close(&self, why: &str) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut inbox = self.inbox();
        inbox.closed.get_or_insert_with(|| why.to_owned());
        if let Some(host) = self.host {
            inbox.lost.insert(host);
        }
        self.arrived.notify_all();
    }

    /// Sends a request. One that cannot be sent whole ends the connection.
    pub(super) fn send(&self, request: &Request, wait: &Wait) -> Result<(), Error> {
        let body = Body::new(request);
        let mut seal = self.seal.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = self.inbox().closed.clone() {
            return Err(self.gone(wait.call, why));
        }
        let tag = seal.tag(&body.digest);
        let frame = [&body.head(&tag), &*body.bytes].concat();
        if let Err(error) = write_by(&self.stream, &frame, wait.end) {
            let why = format!("it does not read: {error}");
            self.close(&why);
            // What the meeting place said before it closed is nearer to the cause.
            return Err(self.gone(wait.call, self.inbox().closed.clone().unwrap_or(why)));
        }
        Ok(())
    }

    fn gone(&self, call: Call, why: String) -> Error {
        Error::Gone { call, address: self.address.clone(), why }
    }

    /// Waits for what `take` finds in the inbox.
    pub(super) fn answer<T>(&self, wait: &Wait, mut take: impl FnMut(&mut Inbox) -> Option<T>) -> Result<T, Error> {
        let mut inbox = self.inbox();
        loop {
            if let Some(found) = take(&mut inbox) {
                return Ok(found);
            }
            if let Some(why) = &inbox.closed {
                return Err(self.gone(wait.call, why.clone()));
            }
            let left = wait.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(inbox);
                let silent =
                    Error::Silent { call: wait.call, address: self.address.clone(), waited: wait.start.elapsed() };
                self.close(&silent.to_string());
                return Err(silent);
            }
            inbox = self.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// An agreement is going to be waited for.
    pub(super) fn expect(&self, call: u32) {
        self.inbox().agreed.push((call, None));
    }

    /// An agreement is no longer waited for. Those who wait are woken.
    pub(super) fn forget(&self, call: u32) {
        self.inbox().agreed.retain(|(waiting, _)| *waiting != call);
        self.arrived.notify_all();
    }
}

fn write_by(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("address", &self.address).finish_non_exhaustive()
    }
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link.fmt(f)
    }
}

impl Deref for Links {
    type Target = Arc<Link>;

    fn deref(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.link.close("this rank left");
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
