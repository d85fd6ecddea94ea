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

    /// Whether the other side holds the secret.
    pub(super) const fn is_proved(&self) -> bool {
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
