//! Malformed messages: from strangers, from guests that hold the secret, from members. Nothing may crash, hang or keep
//! others out.
//!
//! `MOEXPRESS_FUZZ` sets how many messages are sent in all; one in twenty goes over a socket to a live meeting place.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ep_core::{Rank, RankSet};
use rand_xoshiro::Xoshiro256PlusPlus as Random;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use serde_bytes::ByteBuf;

use super::connection::Connection;
use super::hall::{Action, Guest, Hall, Terms};
use crate::program::Program;
use crate::secret::{Seal, Secret, Session, Side};
use crate::wire::{
    Answer, Body, Collective, Frames, MAGIC, MAX_OPENING, Opening, Reply, Request, TAG, VERSION, decode, plain,
};
use crate::{Identity, Member, Settings};

const SHARE_LIVE: u64 = 20;
const WORLD: u32 = 4;

fn messages() -> u64 {
    const USUAL: u64 = 20_000;
    match std::env::var("MOEXPRESS_FUZZ") {
        Ok(number) => number.parse().expect("MOEXPRESS_FUZZ is a number of messages"),
        Err(_) => USUAL,
    }
}

fn secret() -> Secret {
    Secret::from_text("fuzz").unwrap()
}

fn terms() -> Terms {
    let identity = Identity::new().number("hidden", 7168);
    Terms { said_by: Some(0), world: WORLD, program: Program::this(), identity }
}

/// The other end of a connection that is attacked.
trait Target {
    fn send(&mut self, bytes: &[u8]);
    /// The next answer, unless the target refused.
    fn answer(&mut self) -> Option<Answer>;
}

fn below(random: &mut Random, limit: u64) -> u64 {
    random.next_u64() % limit
}

/// Flips, cuts, doubles or fills in, once or a few times.
fn mutate(random: &mut Random, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..=below(random, 4) {
        let at = below(random, bytes.len() as u64 + 1) as usize;
        match below(random, 5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.next_u64() as u8),
            2 => bytes.extend_from_within(at..),
            3 if at < bytes.len() => bytes[at] = 0xff,
            _ if at < bytes.len() => bytes[at] ^= 1 << below(random, 8),
            _ => bytes.push(random.next_u64() as u8),
        }
    }
    bytes
}

fn noise(random: &mut Random) -> Vec<u8> {
    (0..below(random, 200)).map(|_| random.next_u64() as u8).collect()
}

fn ranks(random: &mut Random) -> RankSet {
    (0..below(random, 4)).map(|_| Rank(below(random, u64::from(WORLD) + 1) as u32)).collect()
}

/// A request that decodes, sensible or not.
fn request(random: &mut Random) -> Request {
    let within = random.next_u64() >> below(random, 64);
    match below(random, 12) {
        0 => Request::Join {
            rank: below(random, u64::from(WORLD) + 1) as u32,
            world: if below(random, 50) == 0 { random.next_u64() as u32 } else { WORLD },
            program: Program::this(),
            identity: if below(random, 50) == 0 { Identity::new() } else { terms().identity },
            within,
        },
        1..6 => {
            let root = below(random, u64::from(WORLD) + 2) as u32;
            let collective = [Collective::Barrier, Collective::AllGather, Collective::Broadcast { root }];
            Request::Meet {
                collective: collective[below(random, 3) as usize],
                bytes: ByteBuf::from(noise(random)),
                within,
            }
        }
        6..11 => Request::Agree {
            call: below(random, 3) as u32,
            mask: ranks(random),
            generation: random.next_u64() as u16,
            op: random.next_u64(),
            within,
        },
        _ => Request::Leave { call: below(random, 3) as u32 },
    }
}

/// What a proper member says first.
fn join(rank: u32) -> Request {
    let Terms { world, program, identity, .. } = terms();
    Request::Join { rank, world, program, identity, within: 1_000_000_000 }
}

/// A frame with the right tag, whatever `bytes` are.
fn sealed(seal: &mut Seal, bytes: Vec<u8>) -> Vec<u8> {
    let body = Body::of_bytes(bytes);
    [&body.head(&seal.tag(&body.digest)), &*body.bytes].concat()
}

/// Says hello and proves, as a process of the job does.
fn prove(target: &mut impl Target) -> Option<Seal> {
    let nonce = [7; 32];
    target.send(&plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce }));
    let Answer::Challenge { nonce: theirs, .. } = target.answer()? else { return None };
    let session = Session::new(Some(&secret()), nonce, theirs);
    target.send(&plain(&Opening::Proof { proof: session.proof(Side::Member, VERSION) }));
    let Answer::Proof { .. } = target.answer()? else { return None };
    Some(session.seal(Side::Member, VERSION))
}

/// Sends one malformed message, after as much of a proper opening as it takes to get it there.
fn attack(random: &mut Random, target: &mut impl Target) {
    let hello = plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce: [1; 32] });
    match below(random, 8) {
        0 => target.send(&noise(random)),
        1 => target.send(&mutate(random, hello)),
        2 => {
            let length = random.next_u64() as u32 >> below(random, 32);
            target.send(&[&length.to_le_bytes(), noise(random).as_slice()].concat());
        }
        3 => {
            target.send(&hello);
            let proof = plain(&Opening::Proof { proof: [random.next_u64() as u8; 32] });
            target.send(&if below(random, 2) == 0 { proof } else { mutate(random, proof) });
        }
        4 => {
            let Some(mut seal) = prove(target) else { return };
            let frame = sealed(&mut seal, Body::new(&request(random)).bytes.to_vec());
            target.send(&mutate(random, frame));
        }
        5 => {
            let Some(mut seal) = prove(target) else { return };
            target.send(&sealed(&mut seal, noise(random)));
        }
        6 => {
            let Some(mut seal) = prove(target) else { return };
            let bytes = Body::new(&request(random)).bytes.to_vec();
            target.send(&sealed(&mut seal, mutate(random, bytes)));
        }
        _ => {
            // Proper messages of an improper member.
            let Some(mut seal) = prove(target) else { return };
            for _ in 0..below(random, 8) {
                target.send(&sealed(&mut seal, Body::new(&request(random)).bytes.to_vec()));
            }
        }
    }
}

/// A connection and a hall without sockets.
struct Local<'a> {
    hall: &'a mut Hall,
    open: &'a mut Vec<(Guest, Connection)>,
    guest: Guest,
    now: Instant,
    frames: Frames,
    heard: &'a mut Heard,
}

/// What members were told: shows that the messages get to where things are decided.
#[derive(Default, Debug)]
struct Heard {
    joined: u64,
    met: u64,
    agreed: u64,
    refused: u64,
}

impl Heard {
    fn count(&mut self, body: &Body) {
        *match decode(&body.bytes).expect("a reply") {
            Reply::Joined => &mut self.joined,
            Reply::Met(_) => &mut self.met,
            Reply::Agreed { .. } => &mut self.agreed,
            _ => &mut self.refused,
        } += 1;
    }
}

impl Local<'_> {
    fn connection(&mut self) -> &mut Connection {
        let at = self.open.iter().position(|(guest, _)| *guest == self.guest).expect("it was admitted");
        &mut self.open[at].1
    }

    fn hear(&mut self) {
        loop {
            let heard = match self.connection().next() {
                Ok(None) => return,
                Ok(Some(request)) => self.hall.hear(self.guest, request, self.now).is_ok(),
                Err(_) => false,
            };
            if !heard {
                self.connection().close();
                self.hall.gone(self.guest);
            }
        }
    }
}

impl Target for Local<'_> {
    fn send(&mut self, bytes: &[u8]) {
        self.connection().receive(bytes);
        self.hear();
        for action in self.hall.actions() {
            if let Action::Tell(_, body) = &action {
                self.heard.count(body);
            }
            let (Action::Tell(guest, _) | Action::Dismiss(guest)) = action;
            let connection = self.open.iter_mut().find(|(open, _)| *open == guest).map(|(_, connection)| connection);
            match (action, connection) {
                (Action::Tell(_, body), Some(connection)) => assert!(connection.tell(&body)),
                (Action::Dismiss(_), Some(connection)) => connection.close(),
                (_, None) => {}
            }
        }
    }

    fn answer(&mut self) -> Option<Answer> {
        let mut bytes = Vec::new();
        self.connection().write_to(&mut bytes).unwrap();
        self.frames.push(&bytes);
        self.frames.next(MAX_OPENING).unwrap().and_then(|frame| decode(frame).ok())
    }
}

#[test]
fn malformed_messages_neither_crash_nor_stop_a_hall() {
    let mut random = Random::seed_from_u64(1);
    let messages = messages() - messages() / SHARE_LIVE;
    let start = Instant::now();
    let (mut hall, mut open, mut now, mut refused) = (Hall::new(terms()), Vec::new(), start, 0);
    let mut members: Vec<(Guest, Seal)> = Vec::new();
    let mut heard = Heard::default();
    let mut guests = (0..).map(Guest);
    for number in 0..messages {
        let guest = guests.next().expect("there is no last number");
        open.push((guest, Connection::new(Some(secret()), [3; 32])));
        let (hall, open, heard) = (&mut hall, &mut open, &mut heard);
        let mut local = Local { hall, open, guest, now, frames: Frames::default(), heard };
        // A hall begins with proper members, so that the improper ones meet somebody. They turn improper later.
        if members.len() < WORLD as usize {
            let mut seal = prove(&mut local).expect("it knows the secret");
            local.send(&sealed(&mut seal, Body::new(&join(members.len() as u32)).bytes.to_vec()));
            members.push((guest, seal));
        } else {
            attack(&mut random, &mut local);
            refused += u64::from(local.connection().is_closing());
            let at = below(&mut random, u64::from(WORLD)) as usize;
            let (member, seal) = &mut members[at];
            local.guest = *member;
            local.send(&sealed(seal, Body::new(&request(&mut random)).bytes.to_vec()));
            // Those who were not refused stay for a while.
            if below(&mut random, 4) > 0 {
                local.open.retain(|(open, _)| *open != guest);
                local.hall.gone(guest);
            }
        }
        now += Duration::from_millis(below(&mut random, 50));
        local.hall.tick(now);
        assert!(local.hall.first_deadline().is_none_or(|deadline| deadline > now), "a deadline that passed would spin");
        if number % 50 == 49 {
            (*local.hall, *local.open) = (Hall::new(terms()), Vec::new());
            members.clear();
        }
    }
    println!("{messages} messages without sockets, {refused} refused for good, in {:.1?}; {heard:?}", start.elapsed());
    assert!(heard.joined > 0 && heard.met > 0 && heard.agreed > 0, "{heard:?}");
    assert!(refused > messages / 3, "{refused} of {messages}");
}

/// A socket to a live meeting place.
struct Live(TcpStream);

impl Live {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the meeting place accepts");
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // A reset instead of a farewell: otherwise the system would soon run out of ports.
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        Self(stream)
    }
}

impl Target for Live {
    fn send(&mut self, bytes: &[u8]) {
        // It may have been refused by now.
        let _ = self.0.write_all(bytes);
    }

    fn answer(&mut self) -> Option<Answer> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut frame).ok()?;
        assert!(frame.len() <= TAG + 2);
        decode(&frame).ok()
    }
}

#[test]
fn malformed_messages_do_not_disturb_a_live_meeting_place() {
    const LONG: Duration = Duration::from_secs(60);
    let messages = messages() / SHARE_LIVE;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let settings = |rank| Settings::new(Rank(rank), 2, address.to_string()).secret(Some(secret())).within(LONG);
    let start = Instant::now();
    let (host, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| Member::join(settings(1)).unwrap());
        (Member::host(listener, settings(0)).unwrap(), other.join().unwrap())
    });
    std::thread::scope(|scope| {
        let mut random = Random::seed_from_u64(2);
        for number in 0..messages {
            attack(&mut random, &mut Live::connect(address));
            if number % 500 == 0 {
                let barrier = scope.spawn(|| other.barrier(LONG));
                host.barrier(LONG).unwrap();
                barrier.join().unwrap().unwrap();
            }
        }
        let gathered = scope.spawn(|| other.all_gather(&[1], LONG).unwrap());
        assert_eq!(host.all_gather(&[0], LONG).unwrap(), [Some(vec![0]), Some(vec![1])]);
        gathered.join().unwrap();
        assert!(host.lost().is_empty() && other.lost().is_empty());
    });
    println!("{messages} messages to a live meeting place in {:.1?}", start.elapsed());
}
