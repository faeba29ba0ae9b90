//! The sources that may be answered (ACC-01, ACC-01b, ACC-09, ACC-10, ACC-16).
//!
//! A guest filters by source, so what it has accepted from one address says nothing of another: H
//! answers a source for a minute after G has accepted a connection of it. A refusal of G, or
//! silence, condemns the source's neighbourhood, not the port, or one banned client would end the
//! offload for all others.
//!
//! The caller reports what G does at a server, and what becomes of H's SYNs. Everything else that
//! ACC-01 asks for is the caller's to know: that connections end in G itself (only those are
//! reported), and that G has shown life within two seconds.

use crate::limits::{
    ACCEPT_KNOWN_MAX, ACCEPT_SERVERS_MAX, ACCEPT_WAITING_MAX, ACCEPT_WAITING_MIN, T_CONDEMNED,
    T_LEARNED, T_REFUSED_APART,
};
use crate::store::record::L2Header;
use crate::switch::Mac;
use crate::tcp::accept::grant::Offered;
use crate::tcp::options::SynInfo;
use crate::time::Instant;
use crate::wire::packet::IpAddr16;

/// The last four connections of a port, as [`Port::begun`] has them.
const BEGUN_BY_NET: u8 = 0b1111;

/// A server of a VM.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Server {
    /// The VLANs, as in `FlowKey::vlan`.
    pub vlan: u64,
    /// Its address.
    pub addr: IpAddr16,
    /// Its TCP port.
    pub port: u16,
}

/// Addresses that begin alike.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prefix {
    first: IpAddr16,
    last: IpAddr16,
}

impl Prefix {
    /// The network of an address, by so many of its bits; IPv4 has 32.
    #[must_use]
    pub fn of(addr: IpAddr16, v4_bits: u32, v6_bits: u32) -> Self {
        let is_v4 = addr.to_ip().is_ipv4();
        let bits = if is_v4 { 96 + v4_bits.min(32) } else { v6_bits.min(128) };
        let rest = u128::MAX.checked_shr(bits).unwrap_or(0);
        let number = u128::from_be_bytes(addr.0);
        let address = |number: u128| IpAddr16(number.to_be_bytes());
        Self { first: address(number & !rest), last: address(number | rest) }
    }

    fn contains(&self, addr: IpAddr16) -> bool {
        (self.first..=self.last).contains(&addr)
    }
}

/// The connections that speak for a source (`accept_from`).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum AcceptFrom {
    /// Its own.
    #[default]
    Itself,
    /// Those of any address in the same one of these networks, too.
    Networks(Vec<Prefix>),
    /// All. The guest's source filter then no longer hides that a port is open.
    Any,
}

/// G has accepted a connection of this source.
#[derive(Clone, Copy, Debug)]
struct Known {
    name: (Server, IpAddr16),
    /// The layer-2 header that G used.
    l2: L2Header,
    at: Instant,
}

/// G has refused a connection of a source in this network, or not answered.
#[derive(Clone, Copy, Debug)]
struct Condemned {
    server: Server,
    network: Prefix,
    until: Instant,
}

/// The state of a server that all of its sources share.
#[derive(Clone, Copy, Debug)]
struct Port {
    server: Server,
    offered: Offered,
    used: Instant,
    /// The run of G in which it last completed a connection, how many in that, and the most of any
    /// run lately.
    run: (u64, u32),
    most: (u32, Instant),
    /// For each of the last connections a bit, the newest lowest: R's data began it.
    begun: u8,
    /// Connections that H has accepted and G has not.
    waiting: u32,
    /// The last refusal: where, and when.
    refused: Option<(Prefix, Instant)>,
    condemned_until: Instant,
    /// A SYN of H was not answered in a run of G, and G has sent no SYN-ACK since.
    is_silent: bool,
}

/// The part of its knowledge that H needs for an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The server's newest offer.
    pub offered: Offered,
    /// The layer-2 header for the source.
    pub l2: L2Header,
}

/// Why a SYN is for G to answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NotAnswered {
    /// Nobody whose connections count has completed one there within a minute.
    Unknown,
    /// G uses another way toward the source than the one by which its SYN came, or none is known.
    NoHeader,
    /// The source's network, or the port as a whole, was refused or met silence.
    Condemned,
    /// A SYN of H lies unanswered.
    Silent,
    /// As many connections wait for G's handshake as it may complete in one run.
    Waiting,
}

/// The servers of one VM, and their sources.
#[derive(Debug, Default)]
pub struct Learned {
    /// In the order of their names.
    known: Vec<Known>,
    condemned: Vec<Condemned>,
    ports: Vec<Port>,
}

impl Learned {
    /// Whether H may answer a SYN of `source`, which came from the MAC `next_hop`. `half_open` of
    /// the server's connections may be accepted before. The caller has looked at the rest of
    /// ACC-01.
    ///
    /// # Errors
    /// [`NotAnswered`].
    pub fn may_answer(
        &self,
        now: Instant,
        server: Server,
        source: IpAddr16,
        next_hop: Mac,
        from: &AcceptFrom,
        half_open: u32,
    ) -> Result<Answer, NotAnswered> {
        let port = self.ports.iter().find(|port| port.server == server);
        let port = port.ok_or(NotAnswered::Unknown)?;
        if port.is_silent {
            return Err(NotAnswered::Silent);
        }
        if port.waiting + half_open >= port.waiting_max(now) {
            return Err(NotAnswered::Waiting);
        }
        let l2 = self.header(now, server, source, next_hop, from)?;
        if port.condemned_until > now || self.is_condemned(now, server, source) {
            return Err(NotAnswered::Condemned);
        }
        Ok(Answer { offered: port.offered, l2 })
    }

    /// One connection more may wait for G's handshake at the server (ACC-10).
    #[must_use]
    pub fn has_place(&self, now: Instant, server: Server) -> bool {
        let mut ports = self.ports.iter();
        ports.any(|port| port.server == server && port.waiting < port.waiting_max(now))
    }

    /// G sends a SYN-ACK, to whomever. `asked`: the SYN that it answers, if that is known.
    pub fn on_syn_ack(
        &mut self,
        now: Instant,
        server: Server,
        offered: Offered,
        asked: Option<&SynInfo>,
    ) {
        if let Some(port) = self.ports.iter_mut().find(|port| port.server == server) {
            (port.used, port.is_silent) = (now, false);
            if let Some(asked) = asked {
                port.offered = offered.without_unasked(asked, &port.offered);
            }
            return;
        }
        let new = Port {
            server,
            offered,
            used: now,
            run: (0, 0),
            most: (0, now),
            begun: 0,
            waiting: 0,
            refused: None,
            condemned_until: now,
            is_silent: false,
        };
        if self.ports.len() < ACCEPT_SERVERS_MAX {
            self.ports.push(new);
            return;
        }
        // One whose connections wait, or that must not be answered, is not forgotten.
        let may_go = |port: &&mut Port| port.waiting == 0 && port.condemned_until <= now;
        let oldest = self.ports.iter_mut().filter(may_go).min_by_key(|port| port.used);
        if let Some(port) = oldest {
            *port = new;
        }
    }

    /// G's first segment of a connection behind its SYN-ACK, to a source that opened it. `l2`: of
    /// that segment; `run`: the number of G's run.
    pub fn on_completed(
        &mut self,
        now: Instant,
        server: Server,
        source: IpAddr16,
        l2: L2Header,
        run: u64,
    ) {
        if let Some(port) = self.ports.iter_mut().find(|port| port.server == server) {
            port.on_completed(now, run);
        }
        let known = Known { name: (server, source), l2, at: now };
        match self.place_of(server, source) {
            Ok(place) => self.known[place] = known,
            Err(_) => {
                self.make_room(now);
                let place = self.place_of(server, source).unwrap_or_else(|place| place);
                self.known.insert(place, known);
            }
        }
    }

    /// The first data of a connection comes, from R or from G.
    pub fn on_begun(&mut self, server: Server, by_net: bool) {
        if let Some(port) = self.ports.iter_mut().find(|port| port.server == server) {
            port.begun = port.begun << 1 | u8::from(by_net);
        }
    }

    /// The last connections began with R's data, so a client is not left waiting for a server that
    /// has not got its third ACK, of which a cookie remembers nothing (ACC-15).
    #[must_use]
    pub fn may_give_cookies(&self, server: Server) -> bool {
        let mut ports = self.ports.iter();
        ports.any(|port| port.server == server && port.begun & BEGUN_BY_NET == BEGUN_BY_NET)
    }

    /// H has accepted a connection for G, which has yet to do so.
    pub fn on_waiting(&mut self, server: Server) {
        if let Some(port) = self.ports.iter_mut().find(|port| port.server == server) {
            port.waiting += 1;
        }
    }

    /// G has accepted it, or it is over.
    pub fn on_waited(&mut self, server: Server) {
        if let Some(port) = self.ports.iter_mut().find(|port| port.server == server) {
            port.waiting = port.waiting.saturating_sub(1);
        }
    }

    /// G has answered H's SYN by an RST or an ICMP error, or H has given it up (ACC-01b).
    pub fn on_refused(&mut self, now: Instant, server: Server, source: IpAddr16) {
        self.condemn(now, server, source);
        let wide = Prefix::of(source, 16, 48);
        let Some(port) = self.ports.iter_mut().find(|port| port.server == server) else { return };
        let before = port.refused.replace((wide, now));
        if before.is_some_and(|(other, at)| other != wide && now.since(at) <= T_REFUSED_APART) {
            port.condemned_until = now + T_CONDEMNED;
        }
    }

    /// G has run, and has not answered H's SYN (ACC-09). If it accepted this source itself, its
    /// queue may be full, and nobody is answered before it accepts again; otherwise it may have
    /// filtered the source.
    pub fn on_silence(&mut self, now: Instant, server: Server, source: IpAddr16) {
        if self.place_of(server, source).is_ok() {
            let port = self.ports.iter_mut().find(|port| port.server == server);
            port.into_iter().for_each(|port| port.is_silent = true);
        } else {
            self.condemn(now, server, source);
        }
    }

    /// The ring was reset, the guest has booted, or it was paused for more than two seconds: what
    /// it accepted before says nothing (ACC-01b).
    pub fn on_guest_reset(&mut self, now: Instant) {
        self.known.clear();
        for port in &mut self.ports {
            port.condemned_until = now + T_CONDEMNED;
        }
    }

    /// ACC-01 (i), ACC-16.
    fn header(
        &self,
        now: Instant,
        server: Server,
        source: IpAddr16,
        next_hop: Mac,
        from: &AcceptFrom,
    ) -> Result<L2Header, NotAnswered> {
        if let Ok(place) = self.place_of(server, source)
            && is_fresh(now, &self.known[place])
        {
            return Ok(self.known[place].l2);
        }
        let all = [Prefix::of(source, 0, 0)];
        let networks = match from {
            AcceptFrom::Itself => &[][..],
            AcceptFrom::Networks(networks) => networks,
            AcceptFrom::Any => &all,
        };
        // Others may be behind other stations than this source is.
        let mut why = NotAnswered::Unknown;
        for network in networks.iter().filter(|network| network.contains(source)) {
            for known in self.known_in(server, network).filter(|known| is_fresh(now, known)) {
                if known.l2.bytes().starts_with(&next_hop) {
                    return Ok(known.l2);
                }
                why = NotAnswered::NoHeader;
            }
        }
        Err(why)
    }

    fn place_of(&self, server: Server, source: IpAddr16) -> Result<usize, usize> {
        self.known.binary_search_by_key(&(server, source), |known| known.name)
    }

    fn known_in(&self, server: Server, network: &Prefix) -> impl Iterator<Item = &Known> {
        let first = self.place_of(server, network.first).unwrap_or_else(|place| place);
        let last = (server, network.last);
        self.known[first..].iter().take_while(move |known| known.name <= last)
    }

    fn is_condemned(&self, now: Instant, server: Server, source: IpAddr16) -> bool {
        let mut of_server = self.condemned.iter().filter(|it| it.server == server);
        of_server.any(|it| it.until > now && it.network.contains(source))
    }

    fn condemn(&mut self, now: Instant, server: Server, source: IpAddr16) {
        let network = Prefix::of(source, 24, 64);
        let until = now + T_CONDEMNED;
        let is_it = |it: &&mut Condemned| it.server == server && it.network == network;
        if let Some(it) = self.condemned.iter_mut().find(is_it) {
            it.until = until;
            return;
        }
        self.make_room(now);
        self.condemned.push(Condemned { server, network, until });
    }

    /// For one entry more. Those that have ended go first, then the oldest source: to forget a
    /// refusal would be to answer for a port that G has closed.
    fn make_room(&mut self, now: Instant) {
        if self.known.len() + self.condemned.len() < ACCEPT_KNOWN_MAX {
            return;
        }
        self.condemned.retain(|it| it.until > now);
        self.known.retain(|known| is_fresh(now, known));
        if self.known.len() + self.condemned.len() < ACCEPT_KNOWN_MAX {
            return;
        }
        if let Some(at) = (0..self.known.len()).min_by_key(|&at| self.known[at].at) {
            self.known.remove(at);
        } else if let Some(at) =
            (0..self.condemned.len()).min_by_key(|&at| self.condemned[at].until)
        {
            self.condemned.swap_remove(at);
        }
    }
}

impl Port {
    fn on_completed(&mut self, now: Instant, run: u64) {
        let (last, count) = self.run;
        self.run = (run, if run == last { count + 1 } else { 1 });
        let (most, at) = self.most;
        if self.run.1 >= most || now.since(at) > T_LEARNED {
            self.most = (self.run.1, now);
        }
        self.used = now;
    }

    /// ACC-10.
    fn waiting_max(&self, now: Instant) -> u32 {
        let (most, at) = self.most;
        let lately = if now.since(at) > T_LEARNED { 0 } else { most };
        lately.clamp(ACCEPT_WAITING_MIN, ACCEPT_WAITING_MAX)
    }
}

const _: () = assert!(
    ACCEPT_KNOWN_MAX * size_of::<Known>() <= 29 << 10
        && size_of::<Condemned>() <= size_of::<Known>()
);
const _: () = assert!(ACCEPT_SERVERS_MAX * size_of::<Port>() <= 11 << 10);

fn is_fresh(now: Instant, known: &Known) -> bool {
    now.since(known.at) <= T_LEARNED
}

#[cfg(test)]
mod tests;
