//! An answer as the guest reads it: the request that it repeats is known there.

use core::net::SocketAddr;

use super::{ANSWER, Code, LEN, NATIVE, VERSION, address};
use crate::toe::errno::Errno;

/// A host's answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Reply {
    /// Tag of the request.
    pub tag: u16,
    /// The result.
    pub code: Code,
    /// The socket's own address and the other side's, if they are known.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
    /// Of a socket that was asked about: its state, as `tcpi_state` of Linux has it; else 0.
    pub tcp_state: u8,
}

impl Reply {
    /// Parses an answer. `None`: it is invalid.
    #[must_use]
    pub fn parse(b: &[u8; LEN]) -> Option<Self> {
        if b[0] != VERSION || b[1] <= ANSWER {
            return None;
        }
        let code = match u32::from_le_bytes([b[48], b[49], b[50], b[51]]) {
            0 => Code::Done,
            NATIVE => Code::Native,
            errno => Code::Failed(Errno::of(errno)?),
        };
        let (other, own) = (address(b, 16, 12), address(b, 32, 14));
        let known = own.port() != 0 && other.port() != 0;
        let tag = u16::from_le_bytes([b[2], b[3]]);
        Some(Self { tag, code, addresses: known.then_some((own, other)), tcp_state: b[52] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toe::control::{Answer, Ask, Asked};
    use crate::toe::state::State;
    use crate::toe::vsock::Ports;

    #[test]
    fn what_a_host_writes_a_guest_reads() {
        let asked = Asked { tag: 0x1234, ask: Ask::Describe(Ports { guest: 1025, host: 2 }) };
        let at = |text: &str| text.parse().expect("an address");
        let addresses = Some((at("10.0.0.1:513"), at("[fd00::2]:258")));
        for code in [Code::Done, Code::Native, Code::Failed(Errno::Refused)] {
            for addresses in [None, addresses] {
                for (state, tcp_state) in [(None, 0), (Some(State::Remaining), 8)] {
                    let bytes = Answer { asked, code, addresses, state }.emit();
                    let reply = Reply { tag: 0x1234, code, addresses, tcp_state };
                    assert_eq!(Reply::parse(&bytes), Some(reply));
                }
            }
        }
    }

    #[test]
    fn what_no_answer_is_is_refused() {
        let asked = Asked { tag: 1, ask: Ask::Describe(Ports { guest: 1025, host: 2 }) };
        let good = Answer::of(asked, Code::Done).emit();
        for (at, byte) in [(0, 2), (1, 4), (1, 128), (48, 1)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert_eq!(Reply::parse(&bytes), None, "byte {at}");
        }
    }
}
