//! Whether a connection ends in G, in a container of G, or behind it (FWD-01, FWD-02).
//!
//! Ack offload is for connections that end in G: behind a guest that forwards there is a path with
//! an MTU, a rate and a delay of its own, and R's TCP is that path's only congestion control. The
//! handshake decides: how far the TTL of G's first frame is below a common initial one, whose MAC
//! it has, and how quickly G answers. A later finding is remembered for the server's next
//! connections.

use crate::limits::{ANSWERS_KNOWN, NEAR_ANSWER_MS, SERVERS_PER_VM, T_NOT_LOCAL};
use crate::time::{Duration, Instant};
use crate::wire::packet::IpAddr16;
use crate::wire::saved::{BadImage, Reader, Saved, Writer, saved, saved_enum};

/// Where a connection ends.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Distance {
    /// In the guest.
    #[default]
    Local,
    /// A hop behind it, and quick: in a container of it.
    Near,
    /// Behind it.
    Far,
}

saved_enum!(Distance { Local = 0, Near = 1, Far = 2 });

/// The signs of G in a handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signs {
    /// TTL or hop limit of G's SYN or SYN-ACK.
    pub(crate) ttl: u8,
    /// That frame had another source MAC than G's.
    pub(crate) is_of_a_station: bool,
    /// From R's SYN or SYN-ACK to G's answer, in milliseconds of wall time.
    pub(crate) answer_ms: u16,
    /// The server, if G is that.
    pub(crate) server: Option<(IpAddr16, u16)>,
}

/// Hops behind G by a TTL: it was one of the common initial ones, or `own`.
pub(crate) fn hops(ttl: u8, own: Option<u8>) -> u8 {
    let initial = [64, 128, 255].into_iter().chain(own);
    initial.filter_map(|initial: u8| initial.checked_sub(ttl)).min().unwrap_or(0)
}

/// A server of G, or behind it, that is no plain local one.
#[derive(Clone, Copy, Debug)]
struct Server {
    address: (IpAddr16, u16),
    /// How long its last answers took, in milliseconds; the newest at `answers % ANSWERS_KNOWN`.
    answers_ms: [u16; ANSWERS_KNOWN],
    answers: u32,
    far_until: Instant,
    used: Instant,
}

saved!(Server { address, answers_ms, answers, far_until as Wall, used as Wall });

/// The servers of a VM that are not plain local ones; at most [`SERVERS_PER_VM`].
#[derive(Debug, Default)]
pub(crate) struct Servers(Vec<Server>);

impl Saved for Servers {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let servers = Vec::of_saved(image)?;
        let fits = servers.len() <= SERVERS_PER_VM;
        if fits { Ok(Self(servers)) } else { Err(BadImage::Impossible("Servers")) }
    }
}

impl Servers {
    /// A connection of this server, or of a client, that showed these signs.
    pub(crate) fn judge(&mut self, now: Instant, hops: u8, signs: &Signs) -> Distance {
        let is_far = |server: &Server| server.far_until > now;
        let known = signs.server.and_then(|address| self.find(address));
        if signs.is_of_a_station || hops > 1 || known.is_some_and(is_far) {
            return Distance::Far;
        }
        if hops == 0 {
            return Distance::Local;
        }
        let quickest_ms = match signs.server {
            None => signs.answer_ms,
            Some(address) => self.entry(now, address).quickest_of_last(signs.answer_ms),
        };
        if quickest_ms <= NEAR_ANSWER_MS { Distance::Near } else { Distance::Far }
    }

    /// A connection of this server has shown that it ends behind G.
    pub(crate) fn note_far(&mut self, now: Instant, address: (IpAddr16, u16)) {
        self.entry(now, address).far_until = now + T_NOT_LOCAL;
    }

    /// It has shown that lately.
    pub(crate) fn is_far(&self, now: Instant, address: (IpAddr16, u16)) -> bool {
        self.find(address).is_some_and(|server| server.far_until > now)
    }

    fn find(&self, address: (IpAddr16, u16)) -> Option<&Server> {
        self.0.iter().find(|server| server.address == address)
    }

    /// The entry of a server; if need be in the place of the server that was not used for longest.
    fn entry(&mut self, now: Instant, address: (IpAddr16, u16)) -> &mut Server {
        let at = self.0.iter().position(|server| server.address == address).unwrap_or_else(|| {
            let new = Server {
                address,
                answers_ms: [u16::MAX; ANSWERS_KNOWN],
                answers: 0,
                far_until: Instant::ZERO,
                used: now,
            };
            if self.0.len() < SERVERS_PER_VM {
                self.0.push(new);
                return self.0.len() - 1;
            }
            let oldest = (0..self.0.len()).min_by_key(|&at| self.0[at].used).unwrap_or(0);
            self.0[oldest] = new;
            oldest
        });
        self.0[at].used = now;
        &mut self.0[at]
    }
}

impl Server {
    fn quickest_of_last(&mut self, answer_ms: u16) -> u16 {
        self.answers = self.answers.wrapping_add(1);
        self.answers_ms[self.answers as usize % ANSWERS_KNOWN] = answer_ms;
        self.answers_ms.into_iter().min().unwrap_or(answer_ms)
    }
}

/// Milliseconds of a clock that wraps after a minute, longer than any handshake is waited for.
pub(crate) fn clock_ms(now: Instant) -> u16 {
    (now.as_millis() & 0xffff) as u16
}

const _: () = assert!(size_of::<Server>() * SERVERS_PER_VM <= 16 << 10);
const _: () = assert!(T_NOT_LOCAL.as_nanos() > Duration::from_secs(1).as_nanos());

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);
    const SERVER: (IpAddr16, u16) = (IpAddr16([7; 16]), 80);

    fn signs(answer_ms: u16) -> Signs {
        Signs { ttl: 63, is_of_a_station: false, answer_ms, server: Some(SERVER) }
    }

    #[test]
    fn fwd_01_hops_are_counted_from_the_next_common_ttl() {
        let of = |ttl| hops(ttl, None);
        assert_eq!([64, 63, 62, 128, 127, 255, 254, 65, 1].map(of), [0, 1, 2, 0, 1, 0, 1, 63, 63]);
        assert_eq!((hops(200, None), hops(200, Some(200)), hops(199, Some(200))), (55, 0, 1));
    }

    #[test]
    fn fwd_01_one_hop_is_near_if_one_of_the_last_sixteen_answers_was_quick() {
        let mut servers = Servers::default();
        assert_eq!(servers.judge(NOW, 1, &signs(3)), Distance::Far);
        assert_eq!(servers.judge(NOW, 1, &signs(2)), Distance::Near);
        for _ in 0..15 {
            assert_eq!(servers.judge(NOW, 1, &signs(30)), Distance::Near, "it was off its CPU");
        }
        assert_eq!(servers.judge(NOW, 1, &signs(30)), Distance::Far);
        // A client is known by its own answer alone.
        let client = |answer_ms| Signs { server: None, ..signs(answer_ms) };
        assert_eq!(servers.judge(NOW, 1, &client(2)), Distance::Near);
        assert_eq!(servers.judge(NOW, 1, &client(3)), Distance::Far);
        assert_eq!(servers.judge(NOW, 0, &client(3)), Distance::Local);
    }

    #[test]
    fn fwd_02_what_a_connection_has_shown_counts_for_ten_minutes() {
        let mut servers = Servers::default();
        servers.note_far(NOW, SERVER);
        assert_eq!(servers.judge(NOW, 0, &signs(0)), Distance::Far);
        let later = NOW + T_NOT_LOCAL;
        assert_eq!(servers.judge(later, 0, &signs(0)), Distance::Local);
        // The table is bounded: the others replace the oldest.
        servers.note_far(later, SERVER);
        for port in 0..u16::try_from(SERVERS_PER_VM).unwrap() {
            servers.note_far(later + Duration::from_secs(1), (SERVER.0, 1000 + port));
        }
        assert_eq!(servers.0.len(), SERVERS_PER_VM);
        assert_eq!(servers.judge(later, 0, &signs(0)), Distance::Local);
    }
}
