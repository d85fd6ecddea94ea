//! The meeting place's end of one connection: proofs first, then sealed messages. Bytes in, bytes out, no socket.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use crate::secret::{Seal, Secret, Session, Side, digest};
use crate::wire::{
    Answer, Body, Frames, MAGIC, MAX_MESSAGE, MAX_OPENING, Malformed, Opening, Request, TAG, VERSION, decode, plain,
};

/// The most bytes that may wait for a member to read them. Two full answers fit, and no member is owed more.
const MAX_OWED: usize = 3 * MAX_MESSAGE;

enum State {
    /// Nothing was said.
    New { nonce: [u8; 32] },
    /// The challenge was sent.
    Challenged { session: Session },
    /// The other side has proved that it holds the secret.
    Proved { incoming: Seal, outgoing: Seal },
    /// Whatever comes is ignored.
    Closing,
}

/// Why a connection is no longer listened to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Objection {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("protocol version {theirs}, here {VERSION}")]
    Version { theirs: u16 },
    #[error("another secret, or none")]
    WrongSecret,
}

/// How near a connection has come to being of the job. Who is farther from it gives way first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Standing {
    /// Turned away: it is only told why.
    Refused,
    /// Has not said hello.
    Silent,
    /// Has said hello, which everybody may.
    Greeted,
    /// Holds the secret, and never gives way.
    Proved,
}

/// One connection.
pub(super) struct Connection {
    secret: Option<Secret>,
    state: State,
    frames: Frames,
    owed: VecDeque<Arc<[u8]>>,
    /// Bytes of the first piece that are written already.
    written: usize,
    owed_bytes: usize,
}

impl Connection {
    /// `nonce` must never be used twice.
    pub(super) fn new(secret: Option<Secret>, nonce: [u8; 32]) -> Self {
        let frames = Frames::default();
        Self { secret, state: State::New { nonce }, frames, owed: VecDeque::new(), written: 0, owed_bytes: 0 }
    }

    /// Bytes that arrived.
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        if !matches!(self.state, State::Closing) {
            self.frames.push(bytes);
        }
    }

    /// The next request of a process that holds the secret. Answers those who prove that they do.
    ///
    /// After an objection the connection only writes what it owes.
    pub(super) fn next(&mut self) -> Result<Option<Request>, Objection> {
        let next = self.advance();
        if next.is_err() {
            self.close();
        }
        next
    }

    fn advance(&mut self) -> Result<Option<Request>, Objection> {
        loop {
            let limit = if self.is_proved() { TAG + MAX_MESSAGE } else { MAX_OPENING };
            if matches!(self.state, State::Closing) {
                return Ok(None);
            }
            let Some(frame) = self.frames.next(limit)? else { return Ok(None) };
            if let State::Proved { incoming, .. } = &mut self.state {
                let (tag, bytes) = frame.split_first_chunk::<TAG>().ok_or(Malformed::Tag)?;
                if !incoming.verifies(&digest(bytes), tag) {
                    return Err(Malformed::Tag.into());
                }
                return Ok(Some(decode(bytes)?));
            }
            let opening = decode(frame)?;
            self.open(opening)?;
        }
    }

    fn open(&mut self, opening: Opening) -> Result<(), Objection> {
        match (&self.state, opening) {
            (State::New { nonce }, Opening::Hello { magic, version, nonce: theirs }) => {
                if magic != MAGIC {
                    return Err(Malformed::Foreign.into());
                }
                let session = Session::new(self.secret.as_ref(), theirs, *nonce);
                self.owe(plain(&Answer::Challenge { version: VERSION, nonce: *nonce }).into());
                if version != VERSION {
                    return Err(Objection::Version { theirs: version });
                }
                self.state = State::Challenged { session };
            }
            (State::Challenged { session }, Opening::Proof { proof }) => {
                if !session.proves(Side::Member, VERSION, &proof) {
                    self.owe(plain(&Answer::WrongSecret).into());
                    return Err(Objection::WrongSecret);
                }
                let mine = session.proof(Side::Meeting, VERSION);
                let incoming = session.seal(Side::Member, VERSION);
                let outgoing = session.seal(Side::Meeting, VERSION);
                self.state = State::Proved { incoming, outgoing };
                self.owe(plain(&Answer::Proof { proof: mine }).into());
            }
            (_, Opening::Hello { .. }) => return Err(Malformed::OutOfPlace { what: "a second hello" }.into()),
            (_, Opening::Proof { .. }) => return Err(Malformed::OutOfPlace { what: "a proof before hello" }.into()),
        }
        Ok(())
    }

    pub(super) const fn standing(&self) -> Standing {
        match self.state {
            State::Closing => Standing::Refused,
            State::New { .. } => Standing::Silent,
            State::Challenged { .. } => Standing::Greeted,
            State::Proved { .. } => Standing::Proved,
        }
    }

    /// Whether the other side holds the secret.
    const fn is_proved(&self) -> bool {
        matches!(self.state, State::Proved { .. })
    }

    /// Sends a message. False when the other side has not read what it was sent before, and never will.
    pub(super) fn tell(&mut self, body: &Body) -> bool {
        let State::Proved { outgoing, .. } = &mut self.state else { return true };
        let head = body.head(&outgoing.tag(&body.digest));
        self.owe(head.into());
        self.owe(Arc::clone(&body.bytes));
        self.owed_bytes <= MAX_OWED
    }

    /// Listens no longer. What is owed is still written.
    pub(super) fn close(&mut self) {
        self.state = State::Closing;
        self.frames = Frames::default();
    }

    pub(super) const fn is_closing(&self) -> bool {
        matches!(self.state, State::Closing)
    }

    fn owe(&mut self, piece: Arc<[u8]>) {
        self.owed_bytes += piece.len();
        self.owed.push_back(piece);
    }

    /// Whether everything was written.
    pub(super) fn owes_nothing(&self) -> bool {
        self.owed.is_empty()
    }

    /// Writes what is owed, as far as the other side takes it.
    pub(super) fn write_to(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while let Some(piece) = self.owed.front() {
            match stream.write(&piece[self.written..]) {
                Ok(0) if self.written < piece.len() => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if self.written == piece.len() {
                self.owed_bytes -= self.written;
                self.written = 0;
                self.owed.pop_front();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is told the version here, so that it can name both.
    #[test]
    fn a_hello_of_another_version_is_answered_and_turned_away() {
        let mut connection = Connection::new(None, [3; 32]);
        connection.receive(&plain(&Opening::Hello { magic: MAGIC, version: VERSION + 1, nonce: [1; 32] }));
        assert_eq!(connection.next(), Err(Objection::Version { theirs: VERSION + 1 }));
        let mut said = Vec::new();
        connection.write_to(&mut said).unwrap();
        assert_eq!(said, plain(&Answer::Challenge { version: VERSION, nonce: [3; 32] }));
        assert_eq!(connection.standing(), Standing::Refused);
    }

    /// Each step brings it nearer to the job, and only the last makes it one of it.
    #[test]
    fn a_connection_stands_by_what_it_has_shown() {
        let secret = Secret::from_text("a").unwrap();
        let mut connection = Connection::new(Some(secret.clone()), [3; 32]);
        assert_eq!(connection.standing(), Standing::Silent);
        connection.receive(&plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce: [1; 32] }));
        assert_eq!((connection.next(), connection.standing()), (Ok(None), Standing::Greeted));
        let session = Session::new(Some(&secret), [1; 32], [3; 32]);
        connection.receive(&plain(&Opening::Proof { proof: session.proof(Side::Member, VERSION) }));
        assert_eq!((connection.next(), connection.standing()), (Ok(None), Standing::Proved));
        assert!(Standing::Refused < Standing::Silent && Standing::Silent < Standing::Greeted);
    }
}
