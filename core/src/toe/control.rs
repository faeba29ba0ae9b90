//! Requests of a guest's processes to the host about sockets, and the answers.
//!
//! They travel over a vsock connection to [`PORT`], 64 bytes each, little-endian, and are paired by
//! a tag. Two vsock ports name a socket, so every process that has its descriptor can ask: the
//! guest's side keeps no state.
//!
//! | bytes | request | answer |
//! |---|---|---|
//! | 0 | version, 1 | 1 |
//! | 1 | what is asked | the same + 128 |
//! | 2, 3 | tag | the same |
//! | 4 to 7 | the guest's vsock port | the same |
//! | 8 to 11 | the host's vsock port | the same |
//! | 12, 13 | port: to connect to, or to listen at | of the other side |
//! | 14, 15 | own port | own port |
//! | 16 to 31 | address that goes with bytes 12 and 13 | of the other side |
//! | 32 to 47 | own address | own address |
//! | 48 to 51 | 0 | 0, an errno, or `ffffffff`: use guest TCP |
//! | 52 | 1 or 0, see below | of `Describe` the state, as TCP_INFO has it |
//! | 53 to 63 | 0 | 0 |
//!
//! Byte 52 is 1 if a listener accepts IPv4 as well, and in a request that undoes `Linger`. Bytes 48
//! to 63 of `Connect` are the program's name, or zeros.
//!
//! Addresses are those of IPv6, IPv4 addresses mapped (RFC 4291 section 2.5.5.2).

mod program;
mod reply;

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::errno::Errno;
use super::state::State;
use super::vsock::Ports;

pub use program::Program;
pub use reply::Reply;

/// The host's vsock port for requests.
pub const PORT: u32 = 1;
/// The host's vsock port that sockets connect to after [`Ask::Connect`].
pub const SOCKETS: u32 = 2;
/// Bytes of a request and of an answer.
pub const LEN: usize = 64;

const VERSION: u8 = 1;
const CONNECT: u8 = 1;
const LISTEN: u8 = 2;
const UNLISTEN: u8 = 3;
const DESCRIBE: u8 = 4;
const LINGER: u8 = 5;
const DEAFEN: u8 = 6;
const ANSWER: u8 = 128;
const NATIVE: u32 = u32::MAX;

/// A request's kind and arguments.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ask {
    /// A socket, bound to this vsock port, is going to connect to [`SOCKETS`]. The answer has the
    /// socket's future address, also where it is native: so a connect() to the unspecified address
    /// learns an address of the guest.
    Connect {
        /// The guest's vsock port.
        guest: u32,
        /// Its own address, unspecified if the host is to choose, and its port, which it has taken
        /// in its own stack.
        from: SocketAddr,
        /// The destination.
        to: SocketAddr,
        /// The program that owns the socket.
        program: Program,
    },
    /// A socket listens at this vsock port for connections to `at`.
    Listen {
        /// The guest's vsock port.
        guest: u32,
        /// Its address, unspecified for all of the guest's, and its port.
        at: SocketAddr,
        /// The listener accepts IPv4 as well, as sockets at `::` do without `IPV6_V6ONLY`.
        v4: bool,
    },
    /// The socket at this vsock port listens no more.
    Unlisten {
        /// The guest's vsock port.
        guest: u32,
    },
    /// Asks for a socket's addresses, state and error.
    Describe(Ports),
    /// Its close() is to be a reset (SO_LINGER with 0 s).
    Linger(Ports),
    /// Its close() is to be no reset after all.
    Unlinger(Ports),
    /// Its process reads no more (`SHUT_RD`): blocked reads return an end of file. Later data is
    /// delivered to the guest as before.
    Deafen(Ports),
}

/// A request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Asked {
    /// Repeated in the answer.
    pub tag: u16,
    /// Kind and arguments.
    pub ask: Ask,
}

/// The result in an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Code {
    /// Success. Of [`Ask::Describe`]: the socket has no error; its state says whether it has ended.
    Done,
    /// Use guest TCP. Of [`Ask::Describe`]: the connection was not accepted, because no TOE
    /// listener is there now.
    Native,
    /// The request failed; of [`Ask::Describe`]: the socket did.
    Failed(Errno),
}

impl Code {
    /// The code of a socket that ended with this error or without one.
    #[must_use]
    pub const fn of(errno: Option<Errno>) -> Self {
        match errno {
            None => Self::Done,
            Some(Errno::NotByToe) => Self::Native,
            Some(errno) => Self::Failed(errno),
        }
    }
}

/// An answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The request.
    pub asked: Asked,
    /// The result.
    pub code: Code,
    /// The socket's own address and the other side's, if they are known.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
    /// Of [`Ask::Describe`]: the socket's state.
    pub state: Option<State>,
}

impl Ask {
    /// The ports of the socket in question.
    #[must_use]
    pub const fn socket(&self) -> Option<Ports> {
        match *self {
            Self::Connect { .. } | Self::Listen { .. } | Self::Unlisten { .. } => None,
            Self::Describe(ports)
            | Self::Linger(ports)
            | Self::Unlinger(ports)
            | Self::Deafen(ports) => Some(ports),
        }
    }
}

impl Asked {
    /// Parses a request. `None`: it is invalid.
    #[must_use]
    pub fn parse(b: &[u8; LEN]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let ports = Ports { guest: word(4), host: word(8) };
        let (to, from) = (address(b, 16, 12), address(b, 32, 14));
        let guest = ports.guest;
        let ask = match b[1] {
            CONNECT if to.is_ipv4() == from.is_ipv4() => {
                Ask::Connect { guest, from, to, program: Program::of(&b[48..]) }
            }
            LISTEN => Ask::Listen { guest, at: to, v4: b[52] == 1 },
            UNLISTEN => Ask::Unlisten { guest },
            DESCRIBE => Ask::Describe(ports),
            LINGER if b[52] == 1 => Ask::Unlinger(ports),
            LINGER => Ask::Linger(ports),
            DEAFEN => Ask::Deafen(ports),
            _ => return None,
        };
        let asked = Self { tag: u16::from_le_bytes([b[2], b[3]]), ask };
        (asked.emit() == *b).then_some(asked)
    }

    /// Its bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let none = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
        let (op, ports, to, from) = match self.ask {
            Ask::Connect { guest, from, to, .. } => (CONNECT, Ports { guest, host: 0 }, to, from),
            Ask::Listen { guest, at, .. } => (LISTEN, Ports { guest, host: 0 }, at, none),
            Ask::Unlisten { guest } => (UNLISTEN, Ports { guest, host: 0 }, none, none),
            Ask::Describe(ports) => (DESCRIBE, ports, none, none),
            Ask::Linger(ports) | Ask::Unlinger(ports) => (LINGER, ports, none, none),
            Ask::Deafen(ports) => (DEAFEN, ports, none, none),
        };
        let mut b = [0; LEN];
        b[..2].copy_from_slice(&[VERSION, op]);
        b[2..4].copy_from_slice(&self.tag.to_le_bytes());
        b[4..8].copy_from_slice(&ports.guest.to_le_bytes());
        b[8..12].copy_from_slice(&ports.host.to_le_bytes());
        put_address(&mut b, 16, 12, to);
        put_address(&mut b, 32, 14, from);
        match self.ask {
            Ask::Connect { program, .. } => b[48..].copy_from_slice(&program.bytes()),
            Ask::Listen { v4: true, .. } | Ask::Unlinger(_) => b[52] = 1,
            _ => {}
        }
        b
    }
}

impl Answer {
    /// An answer with a code alone.
    #[must_use]
    pub const fn of(asked: Asked, code: Code) -> Self {
        Self { asked, code, addresses: None, state: None }
    }

    /// Its bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let mut b = self.asked.emit();
        b[1] += ANSWER;
        b[12..].fill(0);
        if let Some((own, other)) = self.addresses {
            put_address(&mut b, 16, 12, other);
            put_address(&mut b, 32, 14, own);
        }
        let code = match self.code {
            Code::Done => 0,
            Code::Native => NATIVE,
            Code::Failed(errno) => errno.number(),
        };
        b[48..52].copy_from_slice(&code.to_le_bytes());
        b[52] = self.state.map_or(0, tcp_state);
        b
    }
}

/// The state as `tcpi_state` (`include/net/tcp_states.h` of Linux).
const fn tcp_state(state: State) -> u8 {
    match state {
        State::Open => 1,
        State::Asking => 2,
        State::Offered => 3,
        State::Finishing => 4,
        State::Finished => 5,
        State::Over | State::Failed => 7,
        State::Remaining => 8,
        State::Closing => 11,
    }
}

fn address(b: &[u8; LEN], ip: usize, port: usize) -> SocketAddr {
    let ip: [u8; 16] = b[ip..ip + 16].try_into().expect("sixteen");
    SocketAddr::new(IpAddr::from(ip).to_canonical(), u16::from_le_bytes([b[port], b[port + 1]]))
}

fn put_address(b: &mut [u8; LEN], ip: usize, port: usize, address: SocketAddr) {
    let octets = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    b[ip..ip + 16].copy_from_slice(&octets);
    b[port..port + 2].copy_from_slice(&address.port().to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asks() -> [Ask; 9] {
        let at = |text: &str| text.parse().expect("an address");
        let ports = Ports { guest: 1025, host: SOCKETS };
        [
            Ask::Connect {
                guest: 7,
                from: at("10.0.0.1:40000"),
                to: at("10.0.0.2:80"),
                program: Program::NONE,
            },
            Ask::Connect {
                guest: 7,
                from: at("[::]:40000"),
                to: at("[fd00::2]:80"),
                program: Program::of(b"a-name-of-fifte"),
            },
            Ask::Listen { guest: 8, at: at("0.0.0.0:80"), v4: false },
            Ask::Listen { guest: 8, at: at("[::]:80"), v4: true },
            Ask::Unlisten { guest: 8 },
            Ask::Describe(ports),
            Ask::Linger(ports),
            Ask::Unlinger(ports),
            Ask::Deafen(ports),
        ]
    }

    #[test]
    fn a_request_reads_back_and_its_answer_has_its_tag() {
        for ask in asks() {
            let asked = Asked { tag: 0x1234, ask };
            assert_eq!(Asked::parse(&asked.emit()), Some(asked));
            let answer = Answer::of(asked, Code::Failed(Errno::Refused)).emit();
            assert_eq!(answer[1], asked.emit()[1] | 0x80);
            assert_eq!((&answer[2..12], answer[48]), (&asked.emit()[2..12], 111));
            assert!(answer[49..].iter().all(|byte| *byte == 0), "{answer:?}");
            assert_eq!(Asked::parse(&answer), None);
        }
    }

    #[test]
    fn an_answer_has_both_addresses() {
        let asked = Asked { tag: 1, ask: asks()[5] };
        let own = "10.0.0.1:513".parse().expect("an address");
        let other = "10.0.0.2:258".parse().expect("an address");
        let addresses = Some((own, other));
        let state = Some(State::Remaining);
        let bytes = Answer { asked, code: Code::Native, addresses, state }.emit();
        assert_eq!(bytes[12..16], [2, 1, 1, 2]);
        assert_eq!(bytes[26..32], [0xff, 0xff, 10, 0, 0, 2]);
        assert_eq!(bytes[42..48], [0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(bytes[48..], [255, 255, 255, 255, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn what_no_request_is_is_refused() {
        let good = Asked { tag: 1, ask: asks()[0] }.emit();
        for (at, byte) in
            [(0, 2), (1, 0), (1, 7), (1, 129), (8, 1), (50, 1), (52, 1), (63, 1), (42, 0)]
        {
            let mut bytes = good;
            bytes[at] = byte;
            assert_eq!(Asked::parse(&bytes), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_would_be_written(a: [u8; 32], b: [u8; 32], op in 0..8_u8) {
            let mut bytes = [0; LEN];
            bytes[..32].copy_from_slice(&a);
            bytes[32..].copy_from_slice(&b);
            bytes[..2].copy_from_slice(&[VERSION, op]);
            if let Some(asked) = Asked::parse(&bytes) {
                prop_assert_eq!(asked.emit(), bytes);
            }
        }
    }
}
