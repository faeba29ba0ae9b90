//! One end of connections that are tested and timed: the lab's commands, and their execution.
//!
//! The same code runs in guests, as `nightporter-lab-peer` on any kind of sockets, and on the host,
//! in a thread of the lab. It has one listener and one connection at a time. The timed part
//! allocates nothing, and the bytes are checked only afterwards.

mod pour;
mod work;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use work::Peer;

/// The commands of a peer. It answers each with one [`Answer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    /// Listen here, and no longer elsewhere. Answer: [`Answer::At`], with the port.
    Listen {
        /// Port 0 is any.
        at: SocketAddr,
    },
    /// Accept the next connection. Answer: [`Answer::At`], with the other side's address.
    Accept,
    /// Make one. Answer: [`Answer::At`], the own address.
    Connect {
        /// Where to.
        to: SocketAddr,
    },
    /// Prepare the data for a transfer of so many bytes, so that it is no part of the transfer.
    /// Answer: [`Answer::Done`].
    Prepare {
        /// How many.
        bytes: usize,
        /// Seed of the data to write.
        seed: u64,
    },
    /// Write so many bytes of this seed, and wait until the other side has read all of them, if it
    /// reports that. Answer: [`Answer::Done`].
    Send {
        /// How many.
        bytes: usize,
        /// See [`crate::data::Source`].
        seed: u64,
        /// The other side is asked to [`Ask::Receive`] with the same.
        answered: bool,
    },
    /// Read so many bytes, and report that over the connection, if asked for. Answer:
    /// [`Answer::Done`].
    Receive {
        /// How many.
        bytes: usize,
        /// Report it.
        answered: bool,
    },
    /// Write and read so many bytes at the same time, as the other side does. Answer:
    /// [`Answer::Done`], when both have read all.
    Exchange {
        /// Each way.
        bytes: usize,
        /// Seed of the data to write.
        seed: u64,
        /// Not before a byte of the other side has come.
        second: bool,
    },
    /// The same by reads and writes of all sizes, which the seed chooses.
    ExchangeUnevenly {
        /// Each way.
        bytes: usize,
        /// Seed of the data to write, and of the sizes.
        seed: u64,
    },
    /// Connect, send a byte, finish, read it again and its end, close; so many times. Answer:
    /// [`Answer::Done`], of all.
    Connects {
        /// Where to.
        to: SocketAddr,
        /// How many times.
        count: usize,
    },
    /// The other way round: accept so many, and send back the bytes of each.
    Accepts {
        /// How many times.
        count: usize,
    },
    /// Begin to write so many bytes, which are never all in memory, and go on with it whatever is
    /// asked next. Answer: [`Answer::Done`], at once.
    Pour {
        /// How many.
        bytes: usize,
        /// Seed of the data to write.
        seed: u64,
    },
    /// How many of them the kernel has taken. Answer: [`Answer::Poured`], or [`Answer::Failed`]
    /// once if it takes no more.
    Poured,
    /// Read so many bytes that the other side pours; then wait until all of the own are written.
    /// Answer: [`Answer::Checked`].
    Drain {
        /// How many.
        bytes: usize,
        /// Seed of the other side's data.
        seed: u64,
    },
    /// Whether the last bytes that were read match this seed. Answer: [`Answer::Checked`].
    Check {
        /// Seed of the other side's data.
        seed: u64,
    },
    /// Send a byte and wait for one, so many times. Answer: [`Answer::Done`], the median.
    Ping {
        /// How many times.
        count: usize,
    },
    /// The other way round.
    Pong {
        /// How many times.
        count: usize,
    },
    /// Write no more: shutdown(SHUT_WR). Answer: [`Answer::Done`].
    Finish,
    /// Read until there is no more. Answer: [`Answer::Ended`], or [`Answer::Failed`] with its
    /// errno.
    ReadToEnd,
    /// End the connection. Answer: [`Answer::Done`].
    Close,
}

/// Its answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "told", rename_all = "snake_case")]
pub enum Answer {
    /// It is done, and took so long by this machine's clock.
    Done {
        /// Nanoseconds.
        ns: u64,
    },
    /// An address; its meaning depends on the command.
    At {
        /// The address.
        address: SocketAddr,
    },
    /// The bytes were checked.
    Checked {
        /// They are the bytes that were sent.
        whole: bool,
    },
    /// So much was written.
    Poured {
        /// Bytes.
        bytes: usize,
    },
    /// The stream ended.
    Ended {
        /// Bytes that came before.
        bytes: usize,
    },
    /// A call failed.
    Failed {
        /// Its errno.
        errno: i32,
        /// It, in words.
        error: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::thread;

    fn pair() -> (Peer, Peer) {
        let (mut server, mut client) = (Peer::default(), Peer::default());
        let at = (Ipv4Addr::LOCALHOST, 0).into();
        let Answer::At { address } = server.obey(Ask::Listen { at }) else { panic!("no listener") };
        let Answer::At { address: own } = client.obey(Ask::Connect { to: address }) else {
            panic!("not connected")
        };
        assert_eq!(server.obey(Ask::Accept), Answer::At { address: own });
        (client, server)
    }

    fn both(client: &mut Peer, server: &mut Peer, asks: [Ask; 2]) -> [Answer; 2] {
        thread::scope(|scope| {
            let second = scope.spawn(move || server.obey(asks[1]));
            [client.obey(asks[0]), second.join().expect("obeyed")]
        })
    }

    #[test]
    fn what_one_peer_sends_the_other_has_and_a_wrong_seed_is_told() {
        let (mut client, mut server) = pair();
        let (bytes, seed) = (300_001, 7);
        server.obey(Ask::Prepare { bytes, seed });
        let send = Ask::Send { bytes, seed, answered: true };
        let told = both(&mut client, &mut server, [send, Ask::Receive { bytes, answered: true }]);
        assert!(told.iter().all(|told| matches!(told, Answer::Done { .. })), "{told:?}");
        assert_eq!(server.obey(Ask::Check { seed }), Answer::Checked { whole: true });
        assert_eq!(server.obey(Ask::Check { seed: 8 }), Answer::Checked { whole: false });
        let exchange = |seed, second| Ask::Exchange { bytes, seed, second };
        both(&mut client, &mut server, [exchange(9, false), exchange(10, true)]);
        assert_eq!(server.obey(Ask::Check { seed: 9 }), Answer::Checked { whole: true });
        assert_eq!(client.obey(Ask::Check { seed: 10 }), Answer::Checked { whole: true });
        both(&mut client, &mut server, [Ask::Ping { count: 3 }, Ask::Pong { count: 3 }]);
        let unevenly = |seed| Ask::ExchangeUnevenly { bytes, seed };
        both(&mut client, &mut server, [unevenly(11), unevenly(12)]);
        assert_eq!(server.obey(Ask::Check { seed: 11 }), Answer::Checked { whole: true });
        assert_eq!(client.obey(Ask::Check { seed: 12 }), Answer::Checked { whole: true });
        client.obey(Ask::Finish);
        assert_eq!(server.obey(Ask::ReadToEnd), Answer::Ended { bytes: 0 });
        server.obey(Ask::Send { bytes: 5, seed, answered: false });
        server.obey(Ask::Close);
        assert_eq!(client.obey(Ask::ReadToEnd), Answer::Ended { bytes: 5 });
        let at = (Ipv4Addr::LOCALHOST, 0).into();
        let Answer::At { address: to } = server.obey(Ask::Listen { at }) else { panic!("no port") };
        let connects = [Ask::Connects { to, count: 5 }, Ask::Accepts { count: 5 }];
        let told = both(&mut client, &mut server, connects);
        assert!(told.iter().all(|told| matches!(told, Answer::Done { .. })), "{told:?}");
    }

    #[test]
    fn what_is_poured_both_ways_is_compared_and_a_wrong_seed_is_told() {
        let (mut client, mut server) = pair();
        let bytes = 5_000_000;
        for (seed, peer) in [(1, &mut client), (2, &mut server)] {
            assert!(matches!(peer.obey(Ask::Pour { bytes, seed }), Answer::Done { .. }));
        }
        let told = both(&mut client, &mut server, [2, 1].map(|seed| Ask::Drain { bytes, seed }));
        assert_eq!(told, [Answer::Checked { whole: true }, Answer::Checked { whole: true }]);
        assert_eq!(client.obey(Ask::Poured), Answer::Poured { bytes });
        client.obey(Ask::Pour { bytes, seed: 3 });
        assert_eq!(server.obey(Ask::Drain { bytes, seed: 4 }), Answer::Checked { whole: false });
        drop(server);
        loop {
            match client.obey(Ask::Poured) {
                Answer::Poured { bytes: so_far } => assert!(so_far < bytes, "nobody reads it"),
                Answer::Failed { errno: libc::ECONNRESET | libc::EPIPE, .. } => break,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_fails_has_its_errno() {
        let (mut client, mut server) = pair();
        server.obey(Ask::Send { bytes: 1, seed: 1, answered: false });
        let free = server.obey(Ask::Listen { at: (Ipv4Addr::LOCALHOST, 0).into() });
        let Answer::At { address: to } = free else { panic!("no listener") };
        drop(server);
        let refused = client.obey(Ask::Connect { to });
        assert!(matches!(refused, Answer::Failed { errno: libc::ECONNREFUSED, .. }), "{refused:?}");
    }
}
