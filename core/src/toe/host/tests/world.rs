//! Two hosts with two guests each, whose kernels do as Linux does, many connections at once, each
//! in both directions; and a network that loses, repeats, reorders and forgets for minutes.

use super::*;
use crate::limits::T_TOE_CONNECT;
use crate::time::Duration;

/// An acceptor's number is the one that it reads first, xor this.
const ANSWER: u64 = 0x5555_5555_5555_5555;
/// Bytes of the number that each stream begins with.
const KEY: u64 = 8;
/// Linux's charge for an unread packet.
const TRUESIZE: u32 = 576;
/// Linux before 6.7 reports read bytes when the other side may know of no more room than this.
const LITTLE: u32 = 65_536;
const GUESTS: u32 = 4;
/// Connections that are made, at any time in the first minute.
const CONNECTIONS: u64 = 12;

/// Faults of a world.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// Of 1000 messages the numbers that are lost, repeated, repeated after minutes.
    lost: u64,
    again: u64,
    late: u64,
    /// Guests close at any time, and the fabric reports lost ends.
    aborts: bool,
    /// Most seconds for which each guest stands still, twice.
    pause: u64,
}

/// The byte at `offset` of the stream that begins with `key`.
fn byte(key: u64, offset: u64) -> u8 {
    if let Some(byte) = key.to_le_bytes().get(usize::try_from(offset).expect("small")) {
        return *byte;
    }
    (key ^ offset).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Standing {
    Asking,
    Connecting,
    Connected,
    Closed,
}

/// A socket of a guest's kernel, and its application.
#[derive(Debug)]
struct Plug {
    ports: Ports,
    standing: Standing,
    /// The key of its stream, once it is known, which also gives the length.
    key: Option<u64>,
    goal: u64,
    sent: u64,
    finished: bool,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    /// Bytes in the buffer, their packets, the bytes that left it, and those reported to the host.
    unread: u32,
    packets: VecDeque<u32>,
    fwd_cnt: u32,
    fwd_told: u32,
    /// The first bytes of the other stream, and its bytes so far.
    other: [u8; 8],
    got: u64,
    ended: bool,
    was_reset: bool,
}

/// A guest's kernel.
struct Kernel {
    vm: VmId,
    buffer: u32,
    plugs: Vec<Plug>,
    to_host: VecDeque<(Header, Vec<u8>)>,
    from_host: VecDeque<(Header, Vec<u8>)>,
    paused: Instant,
    pauses: u32,
    answers_read: u32,
}

impl Kernel {
    fn says(&mut self, ports: Ports, op: Op, flags: u32, fwd_cnt: u32, payload: Vec<u8>) {
        let header = Header {
            src_cid: cid(self.vm),
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            len: u32::try_from(payload.len()).expect("small"),
            kind: STREAM,
            op: Some(op),
            flags,
            buf_alloc: self.buffer,
            fwd_cnt,
        };
        self.to_host.push_back((header, payload));
    }

    /// Sends a packet of a socket.
    fn tells(&mut self, at: usize, op: Op, flags: u32, payload: Vec<u8>) {
        let plug = &mut self.plugs[at];
        plug.fwd_told = plug.fwd_cnt;
        let (ports, fwd_cnt) = (plug.ports, plug.fwd_cnt);
        self.says(ports, op, flags, fwd_cnt, payload);
    }

    fn asks(&mut self, tag: u16, ask: Ask) {
        let ports = Ports { guest: CONTROL, host: control::PORT };
        let payload = Asked { tag, ask }.emit().to_vec();
        self.says(ports, Op::Data, 0, self.answers_read, payload);
    }

    fn plug(ports: Ports, standing: Standing) -> Plug {
        Plug {
            ports,
            standing,
            key: None,
            goal: 0,
            sent: 0,
            finished: false,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            unread: 0,
            packets: VecDeque::new(),
            fwd_cnt: 0,
            fwd_told: 0,
            other: [0; 8],
            got: 0,
            ended: false,
            was_reset: false,
        }
    }

    /// The application writes up to `len` bytes, or finishes; returns whether it did.
    fn writes(&mut self, at: usize, len: u64) -> bool {
        let most = self.buffer;
        let plug = &mut self.plugs[at];
        let Some(key) = plug.key.filter(|_| plug.standing == Standing::Connected) else {
            return false;
        };
        if plug.finished {
            return false;
        }
        if plug.sent == plug.goal {
            plug.finished = true;
            self.tells(at, Op::Shutdown, SHUTDOWN_SEND, vec![]);
            return true;
        }
        let used = i64::try_from(plug.sent).expect("small") - i64::from(plug.peer_fwd_cnt);
        let room = i64::from(plug.peer_buf_alloc.min(most)) - used;
        let len = len.min(plug.goal - plug.sent).min(u64::try_from(room).unwrap_or(0));
        let payload: Vec<u8> = (plug.sent..plug.sent + len).map(|at| byte(key, at)).collect();
        plug.sent += len;
        if len > 0 {
            self.tells(at, Op::Data, 0, payload);
        }
        len > 0
    }

    fn reads(&mut self, at: usize, len: u32) -> bool {
        let plug = &mut self.plugs[at];
        let len = len.min(plug.unread);
        if plug.standing != Standing::Connected || len == 0 {
            return false;
        }
        plug.unread -= len;
        let mut inside = plug.packets.iter().sum::<u32>() - plug.unread;
        while let Some(first) = plug.packets.front().copied().filter(|first| *first <= inside) {
            plug.packets.pop_front();
            inside -= first;
            plug.fwd_cnt += first;
        }
        if self.buffer.saturating_sub(plug.fwd_cnt - plug.fwd_told) < LITTLE {
            self.tells(at, Op::CreditUpdate, 0, vec![]);
        }
        true
    }

    fn closes(&mut self, at: usize) {
        self.plugs[at].finished = true;
        self.plugs[at].standing = Standing::Closed;
        self.tells(at, Op::Shutdown, SHUTDOWN_SEND | SHUTDOWN_RECEIVE, vec![]);
    }

    /// A packet comes out of the receive ring.
    fn hears(&mut self, header: Header, payload: &[u8]) {
        let ports = Ports { guest: header.dst_port, host: header.src_port };
        let op = header.op.expect("known");
        if ports.guest == CONTROL {
            self.answers_read += header.len;
            if let Some(tag) = payload.get(2..4) {
                self.is_answered(u16::from_le_bytes([tag[0], tag[1]]), payload[48]);
            }
            return;
        }
        if op == Op::Request {
            assert_eq!(ports.guest, LISTENS);
            let mut plug = Self::plug(ports, Standing::Connected);
            (plug.peer_buf_alloc, plug.peer_fwd_cnt) = (header.buf_alloc, header.fwd_cnt);
            self.plugs.push(plug);
            return self.tells(self.plugs.len() - 1, Op::Response, 0, vec![]);
        }
        let here = |plug: &Plug| plug.ports == ports && plug.standing != Standing::Closed;
        let Some(at) = self.plugs.iter().position(here) else { return };
        let buffer = self.buffer;
        let plug = &mut self.plugs[at];
        (plug.peer_buf_alloc, plug.peer_fwd_cnt) = (header.buf_alloc, header.fwd_cnt);
        match (plug.standing, op) {
            (Standing::Connecting, Op::Response) => plug.standing = Standing::Connected,
            (Standing::Connected, Op::Data) => {
                plug.unread += header.len;
                plug.packets.push_back(header.len);
                let packets = u32::try_from(plug.packets.len()).expect("few");
                let charged = plug.packets.iter().sum::<u32>() + packets * TRUESIZE;
                assert!(charged <= buffer, "Linux drops this without a word, or resets");
                plug.takes(payload);
            }
            (Standing::Connected, Op::Shutdown) => {
                assert_eq!(header.flags, SHUTDOWN_SEND);
                plug.ended = true;
            }
            (Standing::Connected, Op::CreditRequest) => {
                self.tells(at, Op::CreditUpdate, 0, vec![]);
            }
            (Standing::Connected, Op::CreditUpdate) => {}
            (_, Op::Reset) => {
                plug.was_reset = true;
                plug.standing = Standing::Closed;
            }
            other => panic!("{other:?}"),
        }
    }

    /// The host has answered how a socket connects.
    fn is_answered(&mut self, tag: u16, code: u8) {
        let Some(plug) = self.plugs.get_mut(usize::from(tag)) else { return };
        assert_eq!((plug.standing, code), (Standing::Asking, 0));
        plug.standing = Standing::Connecting;
        self.tells(tag.into(), Op::Request, 0, vec![]);
    }
}

impl Plug {
    /// Bytes come; the first of them determine the others.
    fn takes(&mut self, payload: &[u8]) {
        for b in payload {
            match self.other.get_mut(usize::try_from(self.got).expect("small")) {
                Some(place) => *place = *b,
                None => assert_eq!(*b, byte(u64::from_le_bytes(self.other), self.got)),
            }
            self.got += 1;
        }
        let other = u64::from_le_bytes(self.other);
        if self.got >= KEY {
            // An opener has a key from the beginning.
            let key = *self.key.get_or_insert(other ^ ANSWER);
            assert_eq!(key ^ other, ANSWER, "bytes of another connection");
            self.goal = self.goal.max(goal(key));
        }
    }
}

/// The length of a stream with this key.
fn goal(key: u64) -> u64 {
    KEY + key % 60_000
}

/// A policy that permits all connections; 10.0.0.`h * 2 + 1` is at host `h`.
struct Map;

impl Policy for Map {
    fn connect(&self, _: VmId, _: Program, request: &Request) -> Route {
        let IpAddr::V4(ip) = request.to.ip() else { return Route::Native };
        Route::To(host_of(VmId(u32::from(ip.octets()[3]) - 1)))
    }
}

fn host_of(vm: VmId) -> HostId {
    HostId(vm.0 / 2)
}

/// A message on its way.
#[derive(Clone)]
struct Parcel {
    from: HostId,
    to: HostId,
    message: Message,
    request: Option<Request>,
    payload: Vec<u8>,
    due: Instant,
}

struct World {
    random: Random,
    now: Instant,
    faults: Faults,
    hosts: [Host; 2],
    kernels: Vec<Kernel>,
    parcels: Vec<Parcel>,
    held: Vec<Parcel>,
    /// Payload that waits for a guest's buffers.
    due: [BTreeMap<SocketId, VecDeque<u8>>; 2],
    /// Names of a host's sockets that have sent a message.
    names: [BTreeMap<SocketId, Name>; 2],
    /// Names of ends that were over without an error.
    well: Vec<(ShadowId, Side)>,
    to_open: Vec<Instant>,
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Random::new(seed);
        let mut hosts = [Host::new(100), Host::new(200)];
        let kernels = (0..GUESTS).map(VmId).map(|vm| {
            let ips = vec![Ipv4Addr::new(10, 0, 0, u8::try_from(vm.0 + 1).expect("few")).into()];
            let config = GuestConfig { cid: cid(vm), network: 5, ips };
            assert!(hosts[host_of(vm).0 as usize].add_guest(vm, config, false).is_empty());
            let buffer = [20_000, 100_000, 262_144][usize::try_from(random.below(3)).expect("few")];
            let mut kernel = Kernel {
                vm,
                buffer,
                plugs: vec![],
                to_host: VecDeque::new(),
                from_host: VecDeque::new(),
                paused: NOW,
                pauses: 0,
                answers_read: 0,
            };
            let control = Ports { guest: CONTROL, host: control::PORT };
            kernel.says(control, Op::Request, 0, 0, vec![]);
            let listen = Ask::Listen { guest: LISTENS, at: at("0.0.0.0:80"), v4: false };
            kernel.asks(u16::MAX, listen);
            kernel
        });
        let kernels = kernels.collect();
        // At a time when all listen.
        let at = |_| NOW + Duration::from_millis(5000 + random.below(60_000));
        let to_open = (0..CONNECTIONS).map(at).collect();
        Self {
            random,
            now: NOW,
            faults,
            hosts,
            kernels,
            parcels: vec![],
            held: vec![],
            due: Default::default(),
            names: Default::default(),
            well: vec![],
            to_open,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.random.below(n as u64)).expect("small")
    }

    /// A process of some guest connects to another guest.
    fn opens(&mut self) -> bool {
        let Some(at) = self.to_open.iter().position(|at| *at <= self.now) else { return false };
        self.to_open.swap_remove(at);
        let (from, to) = (self.below(self.kernels.len()), self.below(self.kernels.len()));
        let key = self.random.next() << 11 | self.random.below(1 << 11);
        let kernel = &mut self.kernels[from];
        let tag = u16::try_from(kernel.plugs.len()).expect("few");
        let guest = 10_000 + u32::from(tag);
        let mut plug = Kernel::plug(Ports { guest, host: control::SOCKETS }, Standing::Asking);
        (plug.key, plug.goal) = (Some(key), goal(key));
        kernel.plugs.push(plug);
        let from = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 40_000 + tag);
        let to = Ipv4Addr::new(10, 0, 0, u8::try_from(to + 1).expect("few"));
        kernel.asks(
            tag,
            Ask::Connect {
                program: Program::NONE,
                guest,
                from,
                to: SocketAddr::new(to.into(), 80),
            },
        );
        true
    }

    /// A process of a guest that runs acts.
    fn acts(&mut self, i: usize, at: usize, writes: bool) -> bool {
        let long = [1, 40, 3000, 70_000][self.below(4)];
        let len = 1 + self.random.below(long);
        let aborts = self.faults.aborts && self.random.below(500) == 0;
        let kernel = &mut self.kernels[i];
        if kernel.paused > self.now {
            return false;
        }
        let Some(plug) = kernel.plugs.get(at) else { return false };
        // An acceptor without a key has nothing to send.
        let whole = plug.ended && plug.unread == 0 && (plug.finished || plug.key.is_none());
        if plug.standing == Standing::Connected && (whole || aborts) {
            kernel.closes(at);
            return true;
        }
        if writes {
            kernel.writes(at, len.min(65_536))
        } else {
            kernel.reads(at, u32::try_from(len).expect("small"))
        }
    }

    /// Does every possible action once; returns whether there was any.
    fn sweeps(&mut self) -> bool {
        let mut did = self.opens() | self.carries() | self.gives(0) | self.gives(1);
        for i in 0..self.kernels.len() {
            did |= self.hears(i) | self.takes(i);
            for at in 0..self.kernels[i].plugs.len() {
                did |= self.acts(i, at, true) | self.acts(i, at, false);
            }
        }
        did
    }

    /// A guest's kernel takes a packet out of its ring.
    fn hears(&mut self, i: usize) -> bool {
        let kernel = &mut self.kernels[i];
        if kernel.paused > self.now {
            return false;
        }
        let Some((header, payload)) = kernel.from_host.pop_front() else { return false };
        let vm = kernel.vm;
        self.packs(host_of(vm).0 as usize, vm);
        self.collect(host_of(vm).0 as usize);
        let kernel = &mut self.kernels[i];
        let ended_before = kernel.plugs.iter().filter(|plug| plug.ended).count();
        kernel.hears(header, &payload);
        if kernel.plugs.iter().filter(|plug| plug.ended).count() > ended_before {
            self.check_ends();
        }
        true
    }

    /// A host takes a packet out of a guest's ring.
    fn takes(&mut self, i: usize) -> bool {
        let Some((header, payload)) = self.kernels[i].to_host.pop_front() else { return false };
        let vm = self.kernels[i].vm;
        let h = host_of(vm).0 as usize;
        let mut read = |to: &mut [u8]| {
            to.copy_from_slice(&payload[..to.len()]);
            true
        };
        let host = &mut self.hosts[h];
        let handled = host.handle_packet(self.now, vm, &header, payload.len(), &mut read, &Map);
        if let Handled::Carry(id, message) = handled {
            let to = self.names[h][&id].0;
            self.sends(h, to, message, None, payload);
        }
        self.collect(h);
        assert_eq!(self.hosts[h].lies(vm), 0, "{header:?}");
        true
    }

    fn sends(
        &mut self,
        h: usize,
        to: HostId,
        message: Message,
        request: Option<Request>,
        payload: Vec<u8>,
    ) {
        let from = HostId(u32::try_from(h).expect("two"));
        let due = self.now + Duration::from_millis(self.random.below(1000));
        let parcel = Parcel { from, to, message, request, payload, due };
        if self.random.below(1000) < self.faults.late {
            let due = self.now + Duration::from_secs(self.random.below(300));
            self.parcels.push(Parcel { due, ..parcel.clone() });
        }
        if self.random.below(1000) < self.faults.again {
            self.parcels.push(parcel.clone());
        }
        if self.random.below(1000) >= self.faults.lost {
            self.parcels.push(parcel);
        }
    }

    /// Puts a guest's packets into its ring, which has few buffers.
    fn packs(&mut self, h: usize, vm: VmId) {
        let from_host = &mut self.kernels[vm.0 as usize].from_host;
        while from_host.len() < 64
            && let Some((header, answer)) = self.hosts[h].poll_packet(vm)
        {
            let payload = answer.map_or(vec![], |answer| answer.to_vec());
            from_host.push_back((header, payload));
        }
    }

    /// Takes a host's output.
    fn collect(&mut self, h: usize) {
        while let Some(output) = self.hosts[h].poll_output(self.now) {
            match output {
                Output::Message(id, to, message, request) => {
                    self.names[h].insert(id, (to, message.id, message.to.other()));
                    let is_request = matches!(message.kind, Kind::Request { .. });
                    self.sends(h, to, message, is_request.then_some(request), vec![]);
                }
                Output::Return(to, message) => self.sends(h, to, message, None, vec![]),
                Output::Packets(vm) => self.packs(h, vm),
                Output::Listens(..) => {}
                Output::Gone(id) => {
                    self.due[h].remove(&id);
                    let Some(name) = self.names[h].remove(&id) else { continue };
                    if self.hosts[h].over.contains(self.now, name) {
                        self.well.push((name.1, name.2));
                    }
                }
            }
        }
    }

    /// One of the messages that can arrive does.
    fn carries(&mut self) -> bool {
        let due = |parcel: &Parcel| parcel.due <= self.now;
        let all: Vec<usize> = (0..self.parcels.len()).filter(|i| due(&self.parcels[*i])).collect();
        if all.is_empty() {
            return false;
        }
        let at = all[self.below(all.len())];
        let parcel = self.parcels.swap_remove(at);
        let h = parcel.to.0 as usize;
        let host = &mut self.hosts[h];
        if let Some(request) = &parcel.request {
            host.handle_request(self.now, parcel.from, &parcel.message, request, request.from.ip());
            self.collect(h);
            return true;
        }
        let met = host.handle_message(self.now, parcel.from, &parcel.message);
        let (to, name) = (parcel.to, (parcel.message.id, parcel.message.to));
        self.becomes(met, parcel);
        loop {
            let same = |p: &Parcel| p.to == to && (p.message.id, p.message.to) == name;
            let (held, others) = std::mem::take(&mut self.held).into_iter().partition(same);
            let held: Vec<Parcel> = held;
            let before = held.len();
            self.held = others;
            for parcel in held {
                let met = self.hosts[h].handle_held(self.now, parcel.from, &parcel.message);
                self.becomes(met, parcel);
            }
            if self.held.iter().filter(|p| same(p)).count() == before {
                break;
            }
        }
        self.collect(h);
        if let Some(id) = met.socket.filter(|_| self.faults.aborts)
            && self.random.below(2000) == 0
        {
            self.hosts[h].handle_loss(self.now, id);
            self.collect(h);
        }
        true
    }

    fn becomes(&mut self, met: Met, parcel: Parcel) {
        match met.verdict {
            Verdict::Deliver => {
                let id = met.socket.expect("whose it is");
                let due = &mut self.due[parcel.to.0 as usize];
                due.entry(id).or_default().extend(parcel.payload);
            }
            Verdict::Hold => self.held.push(parcel),
            Verdict::Done => {}
        }
    }

    /// Payload goes into a guest's ring.
    fn gives(&mut self, h: usize) -> bool {
        let fits = |(id, waiting): (&SocketId, &VecDeque<u8>)| {
            let vm = self.hosts[h].sockets.get(*id).expect("not gone").vm;
            let room = self.hosts[h].takes(*id, waiting.len() as u64).min(4096);
            let buffers = self.kernels[vm.0 as usize].from_host.len() < 64;
            (buffers && room > 0).then_some((*id, vm, room))
        };
        let all: Vec<_> = self.due[h].iter().filter_map(fits).collect();
        if all.is_empty() {
            return false;
        }
        let (id, vm, room) = all[self.below(all.len())];
        let kernel = &mut self.kernels[vm.0 as usize];
        let waiting = self.due[h].get_mut(&id).expect("there");
        let len = if self.random.percent(30) { 1 + self.random.below(room) } else { room };
        let header = self.hosts[h].give(self.now, id, u32::try_from(len).expect("small"));
        let payload = waiting.drain(..usize::try_from(len).expect("small")).collect();
        kernel.from_host.push_back((header.expect("it is there"), payload));
        if waiting.is_empty() {
            self.due[h].remove(&id);
        }
        self.collect(h);
        true
    }

    /// A stream that has ended clean has all sent bytes, and its sender had finished.
    fn check_ends(&self) {
        let plugs = || self.kernels.iter().flat_map(|kernel| &kernel.plugs);
        for plug in plugs().filter(|plug| plug.ended) {
            let other = u64::from_le_bytes(plug.other);
            let mut peer = plugs().filter(|peer| peer.key == Some(other));
            // A peer that has sent no key cannot be identified.
            let Some(peer) = peer.next().filter(|_| plug.got >= KEY) else { continue };
            assert!(peer.finished, "it ended before it was finished");
            assert_eq!(plug.got, peer.sent, "it ended clean with bytes missing");
        }
    }

    fn is_done(&self) -> bool {
        let closed = |plug: &Plug| plug.standing == Standing::Closed;
        let done = |k: &Kernel| k.plugs.iter().all(closed) && k.to_host.is_empty();
        self.to_open.is_empty()
            && self.kernels.iter().all(done)
            && self.parcels.is_empty()
            && self.hosts.iter().all(|host| host.sockets() == 0)
    }

    /// No action is possible: time passes until one is.
    fn waits(&mut self) {
        let timers = self.hosts.iter().filter_map(Host::poll_timeout);
        let parcels = self.parcels.iter().map(|parcel| parcel.due);
        let paused = self.kernels.iter().map(|kernel| kernel.paused);
        let all = timers.chain(parcels).chain(paused).chain(self.to_open.iter().copied());
        let next = all.filter(|at| *at > self.now).min();
        self.now = next.expect("something will happen");
    }

    fn run(&mut self) {
        for step in 0_u32.. {
            assert!(step < 300_000, "it does not come to an end");
            if self.is_done() {
                return;
            }
            self.now = self.now + Duration::from_micros(self.random.below(1000));
            for h in 0..2 {
                self.hosts[h].handle_timeout(self.now);
                self.collect(h);
            }
            let (i, h) = (self.below(self.kernels.len()), self.below(2));
            let pauses = self.faults.pause > 0 && self.kernels[i].pauses < 2;
            if pauses && self.random.below(5000) == 0 {
                let long = Duration::from_secs(self.random.below(self.faults.pause));
                self.kernels[i].paused = self.now + long;
                self.kernels[i].pauses += 1;
            }
            let (at, writes) = (self.below(16), self.random.percent(50));
            let did = match self.below(6) {
                0 => self.acts(i, at, writes),
                1 => self.hears(i),
                2 => self.takes(i),
                3 => self.gives(h),
                4 => self.opens(),
                _ => self.carries(),
            };
            if !did && self.random.percent(5) && !self.sweeps() {
                self.waits();
            }
        }
    }

    /// Checks the report of an end that is over about both streams.
    fn judge(&self, seed: u64) {
        self.check_ends();
        let plugs = || self.kernels.iter().flat_map(|kernel| &kernel.plugs);
        let opened = plugs().filter(|plug| plug.ports.host == control::SOCKETS);
        let whole = opened
            .filter(|plug| {
                let answer = plug.key.map(|key| key ^ ANSWER);
                let mut peers = plugs().filter(|peer| peer.key == answer);
                // A process that closes before the end does not read the later bytes of its kernel.
                let has =
                    |to: &Plug, from: &Plug| to.got == from.sent || !to.ended && !to.was_reset;
                let same = |peer: &Plug| has(peer, plug) && has(plug, peer);
                let both = peers.next().is_some_and(|peer| peer.finished && same(peer));
                // The peer of a socket that was closed at once has no key.
                plug.finished && (both || plug.sent < KEY)
            })
            .count();
        let mut well: Vec<ShadowId> = self.well.iter().map(|(id, _)| *id).collect();
        well.sort_unstable();
        well.dedup();
        assert!(well.len() <= whole, "{} are over, {whole} whole, seed {seed}", well.len());
        for plug in plugs() {
            let closed_itself = plug.finished && plug.standing == Standing::Closed;
            assert!(plug.ended || plug.was_reset || closed_itself, "{plug:?} was told nothing");
        }
        let kept = self.hosts.iter().map(|host| host.names.len()).sum::<usize>();
        assert_eq!((kept, self.names[0].len() + self.names[1].len()), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn vtoe_03_whatever_is_reordered_repeated_or_paused_all_streams_of_two_hosts_arrive_whole(
        seed: u64, again in 0..100_u64, late in 0..50_u64, pauses: bool,
    ) {
        // No listener accepts in vain.
        let pause = if pauses { T_TOE_CONNECT.as_nanos() / 3_000_000_000 } else { 0 };
        let faults = Faults { again, late, pause, ..Faults::default() };
        let mut world = World::new(seed, faults);
        world.run();
        world.judge(seed);
        let plugs = || world.kernels.iter().flat_map(|kernel| &kernel.plugs);
        prop_assert_eq!(plugs().count() as u64, 2 * CONNECTIONS, "a ghost, or one that is missing");
        prop_assert!(plugs().all(|plug| plug.ended && !plug.was_reset && plug.sent == plug.goal));
        prop_assert_eq!(world.well.len() as u64, 2 * CONNECTIONS);
    }

    #[test]
    fn vtoe_06_whatever_is_lost_each_stream_of_two_hosts_arrives_whole_or_ends_with_an_errno(
        seed: u64, lost in 1..60_u64, again in 0..50_u64, late in 0..50_u64, aborts: bool,
        pause in 0..400_u64,
    ) {
        let mut world = World::new(seed, Faults { lost, again, late, aborts, pause });
        world.run();
        world.judge(seed);
    }
}
