//! The daemon's ends of the channels to its helpers, with helpers that say anything.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

use super::connector::Connector;
use super::dialer::{Dialer, Undialed};
use super::words::{Channel, REQUEST, Refusal};
use super::{ANSWER_MAX, Broker};

/// Broker, connector and dialer, as the daemon has them, and the other ends.
#[derive(Debug)]
pub struct Rehearsal {
    broker: (Broker, Channel),
    connector: (Connector, Channel),
    dialer: (Dialer, Channel),
}

impl Rehearsal {
    /// Helpers that have said nothing yet.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        let pair = || Channel::pair(ANSWER_MAX);
        let (broker, connector, dialer) = (pair()?, pair()?, pair()?);
        let turn = Mutex::default();
        Ok(Self {
            broker: (Broker { channel: broker.0, turn }, broker.1),
            connector: (Connector::of(connector.0), connector.1),
            dialer: (Dialer::of(dialer.0), dialer.1),
        })
    }

    /// The meaning of an answer of the broker: a descriptor with the number of its interface, none,
    /// or a refusal and what to do about it.
    ///
    /// # Errors
    /// The answer cannot be sent.
    pub fn broker_says(&self, answer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Understood> {
        let (broker, helper) = &self.broker;
        helper.send(answer, fds)?;
        let understood = broker.ask(&[0; REQUEST], &[]);
        let given = |it: super::words::Given| (it.fd, it.index);
        let said = understood.map(|it| it.map(given));
        Ok(said.map_err(|Refusal { what, fix, .. }| (what, fix)))
    }

    /// The meaning of an answer of the connector.
    ///
    /// # Errors
    /// The answer cannot be sent.
    pub fn connector_says(
        &self,
        answer: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<io::Result<TcpStream>> {
        let (connector, helper) = &self.connector;
        helper.send(answer, fds)?;
        Ok(connector.connect(0))
    }

    /// The meaning of an answer of the dialer: the daemon's number, and a connection, or why there
    /// is none. `None`: the other host is not reached.
    ///
    /// # Errors
    /// The answer cannot be sent.
    pub fn dialer_says(
        &mut self,
        answer: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<io::Result<Option<Dialed>>> {
        let (dialer, helper) = &mut self.dialer;
        helper.send(answer, fds)?;
        dialer.ask(0, IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv4Addr::LOCALHOST));
        let undialed = |it: Undialed| match it {
            Undialed::There => None,
            Undialed::Here(e) => Some(e),
        };
        Ok(dialer.poll().map(|it| it.map(|(tag, socket)| (tag, socket.map_err(undialed)))))
    }
}

/// An answer of the broker.
pub type Understood = Result<Option<(OwnedFd, u32)>, (String, String)>;
/// An answer of the dialer.
pub type Dialed = (u64, Result<OwnedFd, Option<io::Error>>);
