//! Messages of the daemon's helpers to it, and messages between the daemon and the booster.
//!
//! Input: which helper, how many descriptors, and its answer, which is read as a packet of the
//! booster and of its daemon, too. Conditions: an answer is taken for what it says or for nonsense;
//! a descriptor that came with it is the one that was sent, and is closed with what it was taken
//! for; what booster and daemon understand they can say, in a packet.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nightporter_boost::protocol::{Budget, Claim, Order, Report};
use nightporterd::broker::Rehearsal;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::noise;

/// Bytes of an answer of the broker that are read, and of one of the dialer.
const ANSWER_MAX: usize = 2048;
const DIALED: usize = 12;
/// Descriptors of a message that there is place for.
const FDS_MAX: usize = 17;

/// Judges one input.
pub fn run(data: &[u8]) {
    words(data);
    let Some(([who, fds], answer)) = data.split_first_chunk() else { return };
    if answer.is_empty() {
        return; // which the kernel does not tell from an end
    }
    let mut helpers = Rehearsal::new().expect("sockets");
    let (reader, writer) = pipe_with(PipeFlags::NONBLOCK).expect("a pipe");
    let fds = vec![writer.as_fd(); usize::from(*fds) % 20];
    if fds.len() <= FDS_MAX {
        match who % 3 {
            0 => of_broker(&helpers, answer, &fds),
            1 => of_dialer(&mut helpers, answer, &fds),
            _ => of_connector(&helpers, answer, &fds),
        }
    }
    drop(writer);
    assert_eq!(rustix::io::read(&reader, &mut [0; 8]), Ok(0), "a descriptor is left");
}

/// The other end of what was sent: whoever writes to it is read there.
fn is_the_one(fd: &OwnedFd, sent: &[BorrowedFd<'_>]) {
    let number = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).expect("it is open").st_ino;
    assert_eq!(number(fd.as_fd()), number(sent[0]), "the descriptor that was sent");
}

fn of_broker(helpers: &Rehearsal, answer: &[u8], fds: &[BorrowedFd<'_>]) {
    let (kind, read) = (answer[0], &answer[..answer.len().min(ANSWER_MAX)]);
    match helpers.broker_says(answer, fds).expect("it is sent") {
        Ok(given) => {
            assert_eq!(kind, 0, "it is done");
            assert_eq!(given.is_some(), !fds.is_empty());
            let index = read[1..].first_chunk().map_or(0, |index| u32::from_ne_bytes(*index));
            given.iter().for_each(|(fd, _)| is_the_one(fd, fds));
            assert!(given.is_none_or(|(_, its)| its == index), "the number that was said");
        }
        Err((what, fix)) => {
            assert_ne!(kind, 0, "it is refused");
            let said = String::from_utf8_lossy(&read[1..]);
            assert!(said.starts_with(&what), "{what}");
            assert!(said.ends_with(&fix) || fix == "report this", "{fix}");
        }
    }
}

fn of_dialer(helpers: &mut Rehearsal, answer: &[u8], fds: &[BorrowedFd<'_>]) {
    let Ok(dialed) = helpers.dialer_says(answer, fds).expect("it is sent") else {
        assert_ne!(answer.len(), DIALED, "nonsense");
        return;
    };
    let (tag, socket) = dialed.expect("it has answered");
    let (said, error) = answer.split_first_chunk().expect("it is as long as that");
    assert_eq!(tag, u64::from_le_bytes(*said));
    match (i32::from_le_bytes(error[..4].try_into().expect("four")), socket) {
        (0, Ok(fd)) => is_the_one(&fd, fds),
        (0, Err(None)) => assert!(fds.is_empty()),
        (raw, Err(Some(e))) => assert_eq!(e.raw_os_error(), Some(raw)),
        (raw, other) => panic!("{raw} is {other:?}"),
    }
}

fn of_connector(helpers: &Rehearsal, answer: &[u8], fds: &[BorrowedFd<'_>]) {
    match helpers.connector_says(answer, fds).expect("it is sent") {
        Ok(socket) => {
            assert!(answer[0] == 0 && !fds.is_empty(), "a connection");
            is_the_one(&socket.into(), fds);
        }
        Err(e) => assert!(answer[0] != 0 || fds.is_empty(), "{e}"),
    }
}

/// Of booster and daemon.
fn words(data: &[u8]) {
    if let Ok(order) = serde_json::from_slice::<Order>(data) {
        let said = serde_json::to_vec(&order).expect("it can be said");
        assert_eq!(serde_json::from_slice::<Order>(&said).expect("and understood"), order);
    }
    if let Ok(report) = serde_json::from_slice::<Report>(data) {
        let said = serde_json::to_vec(&report).expect("it can be said");
        assert_eq!(serde_json::from_slice::<Report>(&said).expect("and understood"), report);
    }
}

/// An answer of each kind, and packets of booster and daemon.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let budget = Some(Budget { cpu_us: 15_000, window_us: 90_000 });
    let (name, tap) = ("a".into(), Some("vnet0".into()));
    let vm = Order::Vm { vm: 1, name, pid: 7, tap, boost: budget, vcpu_cgroup: None };
    let boost = Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 2000, taken: 0 };
    let account = Report::Account { vm: 1, account: nightporter_api::BoostAccount::default() };
    let errno = Errno::ADDRNOTAVAIL.raw_os_error();
    let dialed = |error: i32| [&7_u64.to_le_bytes()[..], &error.to_le_bytes()].concat();
    let mut seeds = vec![
        [&[0, 1, 0][..], &9_u32.to_ne_bytes()].concat(),
        [&[0, 0, 0][..], &[0; 4]].concat(),
        [&[0, 0, 3][..], b"the tap is another's\0wait"].concat(),
        [&[1, 1][..], &dialed(0)].concat(),
        [&[1, 0][..], &dialed(errno)].concat(),
        [&[2, 1, 0][..], &[0; 4]].concat(),
        [&[2, 0, 1][..], errno.to_string().as_bytes()].concat(),
        noise(9, 300),
    ];
    let orders = [&vm, &boost].map(|it| serde_json::to_vec(it).expect("it can be said"));
    seeds.extend(orders);
    seeds.push(serde_json::to_vec(&account).expect("it can be said"));
    seeds
}
