//! Who has a place, and who gives way.

use std::net;

use socket2::{Domain, Socket, Type};

use super::*;
use crate::identity::Identity;
use crate::program::Program;
use crate::secret::{Session, Side};
use crate::wire::{MAGIC, Opening, VERSION};

const WORLD: usize = 1;
/// Connections that have a place before they join.
const PLACES: usize = WORLD + STRANGERS;
/// For what the system does at once.
const SOON: Duration = Duration::from_secs(20);

/// A meeting place that moves only when told to, at a moment that stays: nobody's time runs out.
struct Place {
    reactor: Reactor,
    address: SocketAddr,
    now: Instant,
}

impl Place {
    fn new() -> Self {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let terms = Terms { said_by: None, world: WORLD as u32, program: Program::this(), identity: Identity::new() };
        let (reactor, _) = Reactor::new(listener, terms, None, Arc::default()).unwrap();
        Self { reactor, address, now: Instant::now() }
    }

    /// A stranger connects from the address that ends with `last`, and is let in or not.
    fn connect(&mut self, last: u8) -> net::TcpStream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into()).unwrap();
        socket.connect_timeout(&self.address.into(), SOON).unwrap();
        let stream = net::TcpStream::from(socket);
        stream.set_read_timeout(Some(SOON)).unwrap();
        self.reactor.poll.poll(&mut Events::with_capacity(256), Some(SOON)).unwrap();
        self.reactor.accept(self.now);
        stream
    }

    fn holds(&self, stream: &net::TcpStream) -> bool {
        let peer = stream.local_addr().unwrap();
        self.reactor.open.values().any(|open| open.peer == peer)
    }

    /// The other side of `stream` has said hello, and this.
    fn says(&mut self, stream: &net::TcpStream, more: Option<Opening>) {
        let mut connection = Connection::new(None, [3; 32]);
        connection.receive(&plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce: [1; 32] }));
        more.into_iter().for_each(|more| connection.receive(&plain(&more)));
        assert_eq!(connection.next(), Ok(None));
        let peer = stream.local_addr().unwrap();
        self.reactor.open.values_mut().find(|open| open.peer == peer).unwrap().connection = connection;
    }

    fn greets(&mut self, stream: &net::TcpStream) {
        self.says(stream, None);
    }

    /// The other side of `stream` has proved that it is of this job.
    fn proves(&mut self, stream: &net::TcpStream) {
        let proof = Session::new(None, [1; 32], [3; 32]).proof(Side::Member, VERSION);
        self.says(stream, Some(Opening::Proof { proof }));
    }
}

#[test]
fn when_all_places_are_taken_the_source_of_most_strangers_gives_one_up() {
    let mut place = Place::new();
    let other = place.connect(3);
    let mut flood: Vec<_> = (1..PLACES).map(|_| place.connect(2)).collect();
    assert!(flood.iter().chain([&other]).all(|stream| place.holds(stream)), "there is room for all");
    let late = place.connect(4);
    assert!(place.holds(&late) && place.holds(&other));
    assert!(!place.holds(&flood[0]) && flood[1..].iter().all(|stream| place.holds(stream)));
    // Without a word.
    assert!(matches!(flood[0].read(&mut [0; 16]), Ok(0)));
}

#[test]
fn who_has_proved_itself_keeps_its_place_however_many_come() {
    let mut place = Place::new();
    let ranks: Vec<_> = (0..PLACES).map(|_| place.connect(2)).collect();
    ranks[1..].iter().for_each(|rank| place.proves(rank));
    let late = place.connect(3);
    assert!(place.holds(&late) && !place.holds(&ranks[0]), "a stranger gives way");
    place.proves(&late);
    let later = place.connect(4);
    assert!(!place.holds(&later) && place.holds(&late) && ranks[1..].iter().all(|rank| place.holds(rank)));
}

/// Strangers may say hello, and hold all places.
#[test]
fn who_has_just_come_is_heard_before_it_gives_way() {
    let mut place = Place::new();
    let flood: Vec<_> = (0..PLACES).map(|_| place.connect(2)).collect();
    flood.iter().for_each(|stream| place.greets(stream));
    let rank = place.connect(2);
    let next = place.connect(2);
    assert!(place.holds(&rank) && place.holds(&next) && !place.holds(&flood[0]) && !place.holds(&flood[1]));
    place.now += UNHEARD;
    let late = place.connect(2);
    assert!(place.holds(&late) && !place.holds(&rank) && place.holds(&flood[2]), "who says nothing gives way first");
}

#[test]
fn who_gives_way_for_lack_of_descriptors_is_told_so() {
    let mut place = Place::new();
    assert!(!place.reactor.makes_room(place.now, Some("none")), "nobody is there");
    let mut stranger = place.connect(2);
    assert!(place.reactor.makes_room(place.now, Some("none")) && !place.holds(&stranger));
    let mut told = Vec::new();
    stranger.read_to_end(&mut told).unwrap();
    assert_eq!(told, plain(&Answer::Full { why: "none".to_owned() }));
}
