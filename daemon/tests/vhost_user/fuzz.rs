//! Front-ends that send anything: no panic, nothing blocks, and no descriptor is kept.
//!
//! That descriptors are closed shows at a pipe: its reader sees the end of file only when every
//! copy of the writing end is gone.

use std::os::fd::{AsFd, OwnedFd};

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::closer;
use nightporterd::port::vhost_user::VhostUserPort;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::pipe::pipe;

use crate::world::{FrontEnd, LINUX, Req, World, new_eventfd, port};

/// A descriptor to send along.
#[derive(Clone, Copy, Debug)]
enum Fd {
    /// A pipe's writing end, whose life is watched.
    Pipe,
    Eventfd,
    Memfd(u32),
    Null,
}

/// One step of a front-end that has lost its mind.
#[derive(Clone, Debug)]
enum Step {
    Raw(Vec<u8>, Vec<Fd>),
    Message { code: u32, flags: u32, payload: Vec<u8>, fds: Vec<Fd> },
    UseData,
}

fn any_fd() -> impl Strategy<Value = Fd> {
    prop_oneof![
        4 => Just(Fd::Pipe),
        4 => Just(Fd::Eventfd),
        4 => (0_u32..1 << 20).prop_map(Fd::Memfd),
        1 => Just(Fd::Null),
    ]
}

/// Words as messages have them: small numbers, addresses, sizes, and noise.
fn any_word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..4,
        2 => Just(LINUX),
        2 => Just(0x40_0000_0040),
        1 => (0_u64..64).prop_map(|bit| 1 << bit),
        2 => 0_u64..1 << 20,
        1 => any::<u64>(),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let payload = prop::collection::vec(any_word(), 0..12);
    let fds = || prop::collection::vec(any_fd(), 0..5);
    let message = (0_u32..50, prop::sample::select(vec![1_u32, 1, 9]), payload, 0_usize..8, fds());
    prop_oneof![
        20 => message.prop_map(|(code, flags, words, cut, fds)| {
            let mut payload: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
            if cut == 0 {
                payload.pop();
            }
            Step::Message { code, flags, payload, fds }
        }),
        1 => (prop::collection::vec(any::<u8>(), 0..64), fds()).prop_map(|(b, f)| Step::Raw(b, f)),
        4 => Just(Step::UseData),
    ]
}

fn make(fds: &[Fd], pipe_end: &OwnedFd) -> Vec<OwnedFd> {
    let make = |fd: &Fd| match fd {
        Fd::Pipe => pipe_end.try_clone().unwrap(),
        Fd::Eventfd => new_eventfd(),
        Fd::Memfd(len) => {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("fuzz", flags).unwrap();
            ftruncate(&file, u64::from(*len)).unwrap();
            fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
            file
        }
        Fd::Null => std::fs::File::open("/dev/null").unwrap().into(),
    };
    fds.iter().map(make).collect()
}

/// Uses the port as a worker does, whatever state it is in.
fn use_data(port: &mut VhostUserPort) {
    let mut buf = [0; 2000];
    for pair in 0..3 {
        for _ in 0..100 {
            if port.poll_from_guest(pair, &mut buf).is_none() {
                break;
            }
        }
        let _ = port.push_to_guest(pair, &VirtioNetHdr::default(), &[&[0; 100]]);
        port.flush_from_guest(pair);
        port.flush_to_guest(pair);
        let _ = port.enable_kicks_from_guest(pair);
        let _ = port.guest_progress(pair);
    }
    for vring in 0..6 {
        port.handle_kick(vring);
    }
    while port.poll_event().is_some() {}
}

/// Whether the last writer of the pipe is gone.
fn is_at_end(reader: &OwnedFd) -> bool {
    loop {
        match rustix::io::read(reader, &mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

fn run(port: &mut VhostUserPort, mut front: FrontEnd, steps: &[Step]) {
    let (reader, writer) = pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&reader).unwrap();
    rustix::fs::fcntl_setfl(&reader, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    for step in steps {
        match step {
            Step::Raw(bytes, fds) => {
                let fds = make(fds, &writer);
                front.send_raw(bytes, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
            }
            Step::Message { code, flags, payload, fds } => {
                let fds = make(fds, &writer);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                front.send(*code, *flags, payload, &fds);
            }
            Step::UseData => use_data(port),
        }
        port.handle_connection();
    }
    front.hang_up();
    port.handle_connection();
    port.handle_connection();
    while port.poll_event().is_some() {}
    assert!(port.link().is_none());
    drop(writer);
    closer::flush();
    assert!(is_at_end(&reader), "a descriptor was kept after the connection ended");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_messages_are_survived(steps in prop::collection::vec(any_step(), 1..40)) {
        let (mut port, socket) = port(2);
        let front = FrontEnd::connect(&mut port, &socket);
        run(&mut port, front, &steps);
        // And the next front-end is served.
        let front = FrontEnd::connect(&mut port, &socket);
        front.send(Req::GET_FEATURES.into(), 1, &[], &[]);
        port.handle_connection();
        prop_assert!(front.reply().is_some());
    }

    #[test]
    fn a_running_device_survives_any_messages(
        steps in prop::collection::vec(any_step(), 1..40),
    ) {
        let world = World::running(LINUX);
        let World { mut port, front, .. } = world;
        run(&mut port, front, &steps);
    }
}

#[test]
fn too_many_descriptors_end_the_connection_and_are_closed() {
    let (mut port, socket) = port(1);
    let front = FrontEnd::connect(&mut port, &socket);
    let fds = [Fd::Pipe; 33];
    let message =
        Step::Message { code: Req::SET_OWNER.into(), flags: 1, payload: vec![], fds: fds.to_vec() };
    let half = Step::Raw(vec![1, 0, 0], vec![Fd::Pipe; 3]);
    run(&mut port, front, &[half, message]);
}
