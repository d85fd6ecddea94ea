//! Carries bytes between sockets and the hall, in one thread that sleeps until something happens.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ep_core::Rank;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use socket2::SockRef;

use super::connection::{Connection, Standing};
use super::hall::{Action, Guest, Hall, Terms};
use super::room::gives_way;
use crate::secret::{Secret, random};
use crate::socket;
use crate::wire::{Answer, plain};

/// How long a connection may take from its first byte to joining.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);

/// For so long a connection counts as one that has said hello: its hello may be on its way. Otherwise strangers that have said theirs could hold all places,
/// and each newcomer would give way to the next one before it is heard.
const UNHEARD: Duration = Duration::from_millis(50);

/// How long a connection may take to read its last words, and the meeting place to close.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long to wait after the system could not accept a connection, for instance for lack of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Connections beyond one for each rank that may not have joined yet. Then one gives way.
const STRANGERS: usize = 256;

/// Connections that the system keeps until they are accepted, and how many are accepted before those that are open are heard:
/// who connects without pause keeps nobody from being heard.
const BACKLOG: i32 = 4096;
const ACCEPTS: usize = 64;

/// Descriptors that are kept to tell who connects that there are no others. Another thread of the process may take one that is
/// given up: rank 0's own connection, for instance.
const SPARE: usize = 4;

/// Reads in a row from one connection before the others have their turn.
const READS: usize = 16;

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_GUEST: usize = 2;

struct Open {
    stream: TcpStream,
    peer: SocketAddr,
    connection: Connection,
    /// When it came.
    since: Instant,
    /// When it is closed, unless it has joined by then.
    deadline: Option<Instant>,
    /// More may be there to be read.
    readable: bool,
    /// Nothing more will be written.
    shut: bool,
}

impl Open {
    /// As far as is known of one that may have had no time to say anything.
    fn standing(&self, now: Instant) -> Standing {
        match self.connection.standing() {
            Standing::Silent if now < self.since + UNHEARD => Standing::Greeted,
            standing => standing,
        }
    }
}

/// What serving a connection came to.
enum Served {
    Alive,
    Ended,
}

pub(super) struct Reactor {
    poll: Poll,
    listener: TcpListener,
    /// Descriptors to be given up when there is no other, so that who connects then can be told.
    spare: Vec<std::net::TcpListener>,
    /// When to accept connections again; none while the listener will say so.
    accept_at: Option<Instant>,
    open: BTreeMap<Guest, Open>,
    next: usize,
    hall: Hall,
    world: usize,
    secret: Option<Secret>,
    orders: Arc<Orders>,
    chunk: Vec<u8>,
}

/// What whoever holds the place has to say to its thread, which is woken then.
#[derive(Debug, Default)]
pub(super) struct Orders {
    stop: AtomicBool,
    /// Ranks whose processes have ended.
    ended: Mutex<Vec<Rank>>,
}

impl Orders {
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self, rank: Rank) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(rank);
    }

    fn take_ended(&self) -> Vec<Rank> {
        std::mem::take(&mut self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Reactor {
    pub(super) fn new(
        listener: std::net::TcpListener,
        terms: Terms,
        secret: Option<Secret>,
        orders: Arc<Orders>,
    ) -> io::Result<(Self, Waker)> {
        listener.set_nonblocking(true)?;
        // Whoever made the listener asked for fewer. Where it cannot be changed, connecting takes longer in a flood.
        let _ = SockRef::from(&listener).listen(BACKLOG);
        let spare = (0..SPARE).map(|_| listener.try_clone()).collect::<io::Result<_>>()?;
        let mut listener = TcpListener::from_std(listener);
        let poll = Poll::new()?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let world = terms.world as usize;
        let reactor = Self {
            poll,
            listener,
            spare,
            accept_at: None,
            open: BTreeMap::new(),
            next: FIRST_GUEST,
            hall: Hall::new(terms),
            world,
            secret,
            orders,
            chunk: vec![0; 64 << 10],
        };
        Ok((reactor, waker))
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut closing: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let timeout = self.sleep(closing).map(|at| at.saturating_duration_since(now));
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    tracing::error!(%error, "the meeting place cannot wait for messages and closes");
                    return;
                }
                _ => {}
            }
            let now = Instant::now();
            for event in &events {
                match event.token() {
                    LISTENER => self.accept_at = Some(now),
                    WAKER => {}
                    Token(guest) => {
                        if let Some(open) = self.open.get_mut(&Guest(guest)) {
                            open.readable = true;
                        }
                    }
                }
            }
            if self.orders.stop.load(Ordering::Acquire) && closing.is_none() {
                closing = Some(now + LAST_WORDS);
                self.close_all(now);
            }
            let open = closing.is_none() || self.hall.owes_verdict();
            if open && self.accept_at.is_some_and(|at| at <= now) {
                self.accept(now);
            }
            self.listen_all(now);
            // Behind what has come: who has joined has not ended before that.
            self.orders.take_ended().into_iter().for_each(|rank| self.hall.ended(rank));
            self.expire(now);
            self.answer_all(now);
            let done = self.open.is_empty() && !self.hall.owes_verdict();
            if closing.is_some_and(|at| at <= now || done) {
                return;
            }
        }
    }

    /// When to wake up if nothing happens.
    fn sleep(&self, closing: Option<Instant>) -> Option<Instant> {
        let busy = self.open.values().any(|open| open.readable).then(Instant::now);
        let deadlines = self.open.values().filter_map(|open| open.deadline).min();
        [busy, deadlines, self.hall.first_deadline(), self.accept_at, closing].into_iter().flatten().min()
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if let Err(error) = self.admit(stream, peer, now) {
                        tracing::warn!(%peer, %error, "a connection could not be set up");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.accept_at = None;
                    return;
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                Err(error) if socket::is_out_of_descriptors(&error) => {
                    let why = error.to_string();
                    self.hall.turned_away(format!("no file descriptors are left at the meeting place: {why}"));
                    if !self.makes_room(now, Some(&why)) {
                        tracing::warn!(%error, "connections cannot be accepted");
                        self.turn_away(why);
                        self.accept_at = Some(now + ACCEPT_AGAIN);
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "connections cannot be accepted");
                    self.accept_at = Some(now + ACCEPT_AGAIN);
                    return;
                }
            }
        }
        // The others first, then more.
        self.accept_at = Some(now);
    }

    /// Closes the connection that [`gives_way`], and tells it `why`. False when all are of this job.
    fn makes_room(&mut self, now: Instant, why: Option<&str>) -> bool {
        let strangers = self.open.iter().filter(|(_, open)| open.deadline.is_some());
        let strangers = strangers.map(|(&guest, open)| (guest, open.standing(now), open.peer.ip()));
        let Some(guest) = gives_way(strangers) else { return false };
        if let (Some(open), Some(why)) = (self.open.get_mut(&guest), why) {
            // As far as it goes at once.
            let _ = open.stream.write_all(&plain(&Answer::Full { why: why.to_owned() }));
            let _ = open.stream.shutdown(Shutdown::Write);
        }
        self.drop_guest(guest);
        true
    }

    /// Tells those who connect that there is no descriptor for them, by means of the last one.
    fn turn_away(&mut self, why: String) {
        let answer = plain(&Answer::Full { why });
        drop(self.spare.pop());
        for _ in 0..ACCEPTS {
            let Ok((mut stream, _)) = self.listener.accept() else { break };
            // What the other side said is taken in, or the end would look like a broken connection. It comes again.
            let _ = stream.read(&mut self.chunk);
            let _ = stream.write_all(&answer);
            let _ = stream.shutdown(Shutdown::Write);
        }
        while self.spare.len() < SPARE
            && let Ok(listener) = SockRef::from(&self.listener).try_clone()
        {
            self.spare.push(listener.into());
        }
    }

    fn admit(&mut self, mut stream: TcpStream, peer: SocketAddr, now: Instant) -> io::Result<()> {
        let strangers = self.open.values().filter(|open| open.deadline.is_some()).count();
        if strangers >= self.world + STRANGERS && !self.makes_room(now, None) {
            tracing::warn!(limit = self.world + STRANGERS, "too many connections that have not joined");
            return Ok(());
        }
        let nonce = random().map_err(io::Error::other)?;
        socket::prepare(&stream)?;
        let guest = Guest(self.next);
        self.next += 1;
        self.poll.registry().register(&mut stream, Token(guest.0), Interest::READABLE | Interest::WRITABLE)?;
        let connection = Connection::new(self.secret.clone(), nonce);
        let deadline = Some(now + HANDSHAKE);
        let open = Open { stream, peer, connection, since: now, deadline, readable: true, shut: false };
        self.open.insert(guest, open);
        Ok(())
    }

    /// Reads from all who have something to say.
    fn listen_all(&mut self, now: Instant) {
        let guests: Vec<Guest> = self.open.keys().copied().collect();
        for guest in guests {
            if let Served::Ended = self.listen(guest, now) {
                self.drop_guest(guest);
            }
        }
    }

    /// Does what the hall decided, and writes to all who take it.
    fn answer_all(&mut self, now: Instant) {
        loop {
            self.act(now);
            let guests: Vec<Guest> = self.open.keys().copied().collect();
            let ended: Vec<Guest> =
                guests.into_iter().filter(|&guest| matches!(self.speak(guest), Served::Ended)).collect();
            if ended.is_empty() {
                return;
            }
            ended.into_iter().for_each(|guest| self.drop_guest(guest));
        }
    }

    fn listen(&mut self, guest: Guest, now: Instant) -> Served {
        for _ in 0..READS {
            let Some(open) = self.open.get_mut(&guest) else { return Served::Alive };
            if !open.readable {
                return Served::Alive;
            }
            match open.stream.read(&mut self.chunk) {
                Ok(0) => return Served::Ended,
                Ok(bytes) => {
                    open.connection.receive(&self.chunk[..bytes]);
                    self.hear(guest, now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => open.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Served::Ended,
            }
        }
        Served::Alive
    }

    /// Hands complete requests to the hall.
    fn hear(&mut self, guest: Guest, now: Instant) {
        while let Some(open) = self.open.get_mut(&guest) {
            let objection = match open.connection.next() {
                Ok(None) => return,
                Ok(Some(request)) => match self.hall.hear(guest, request, now) {
                    Ok(()) => {
                        if self.hall.is_member(guest) {
                            open.deadline = None;
                        }
                        continue;
                    }
                    Err(malformed) => malformed.to_string(),
                },
                Err(objection) => objection.to_string(),
            };
            tracing::warn!(peer = %open.peer, %objection, "a connection is turned away");
            open.connection.close();
            open.deadline = Some(now + LAST_WORDS);
            self.hall.turned_away(format!("{}: {objection}", open.peer));
            self.hall.gone(guest);
        }
    }

    /// Does what the hall decided.
    fn act(&mut self, now: Instant) {
        loop {
            let actions = self.hall.actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Tell(guest, body) => {
                        let reads = self.open.get_mut(&guest).is_none_or(|open| open.connection.tell(&body));
                        if !reads {
                            tracing::warn!(?guest, "a member does not read its messages and is dropped");
                            self.drop_guest(guest);
                        }
                    }
                    Action::Dismiss(guest) => self.dismiss(guest, now),
                }
            }
        }
    }

    fn dismiss(&mut self, guest: Guest, now: Instant) {
        if let Some(open) = self.open.get_mut(&guest) {
            open.connection.close();
            open.deadline = Some(now + LAST_WORDS);
        }
    }

    fn speak(&mut self, guest: Guest) -> Served {
        let Some(open) = self.open.get_mut(&guest) else { return Served::Alive };
        if open.connection.write_to(&mut open.stream).is_err() {
            return Served::Ended;
        }
        // The other side reads to the end and closes: closing first, with bytes of it unread, could destroy what it has
        // not read yet.
        if open.connection.is_closing() && open.connection.owes_nothing() && !open.shut {
            open.shut = true;
            if open.stream.shutdown(Shutdown::Write).is_err() {
                return Served::Ended;
            }
        }
        Served::Alive
    }

    fn drop_guest(&mut self, guest: Guest) {
        if self.open.remove(&guest).is_some() {
            self.hall.gone(guest);
        }
    }

    fn expire(&mut self, now: Instant) {
        let late = |(&guest, open): (&Guest, &Open)| open.deadline.is_some_and(|at| at <= now).then_some(guest);
        let late: Vec<Guest> = self.open.iter().filter_map(late).collect();
        for guest in late {
            if let Some(open) = self.open.get(&guest).filter(|open| !open.connection.is_closing()) {
                self.hall.turned_away(format!("{}: silent for {HANDSHAKE:?}", open.peer));
            }
            self.drop_guest(guest);
        }
        if self.hall.first_deadline().is_some_and(|at| at <= now) {
            self.hall.tick(now);
        }
    }

    /// Rank 0 leaves, and with it everybody else; those who have not asked to join yet stay to hear why that is in vain.
    fn close_all(&mut self, now: Instant) {
        self.hall.host_leaves();
        self.act(now);
        let stays = |open: &Open| self.hall.owes_verdict() && open.deadline.is_some();
        let leave: Vec<Guest> = self.open.iter().filter(|(_, open)| !stays(open)).map(|(&guest, _)| guest).collect();
        leave.into_iter().for_each(|guest| self.dismiss(guest, now));
    }
}

#[cfg(test)]
mod tests;
