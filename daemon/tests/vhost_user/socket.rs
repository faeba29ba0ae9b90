//! The listening socket and who is on it.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};

use nightporterd::port::vhost_user::{PortError, VhostUserConfig, VhostUserPort};
use nightporterd::vhost::Source;
use nightporterd::vhost::listener::{Access, ListenError};

use crate::world::{FrontEnd, LINUX, Req, World, config, port, socket_path};

#[test]
fn a_path_with_a_live_listener_is_taken() {
    let (_port, socket) = port(1);
    let error = VhostUserPort::new(&config(socket.clone())).unwrap_err();
    assert!(matches!(error, PortError::Listen(ListenError::Taken(ref path)) if *path == socket));
    assert!(error.to_string().contains("the socket path is taken"));
}

#[test]
fn a_dead_daemons_socket_is_replaced() {
    let socket = socket_path();
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists(), "std leaves the file behind, as a crash does");
    let mut port = VhostUserPort::new(&config(socket.clone())).unwrap();
    let _front = FrontEnd::connect(&mut port, &socket);
    assert_eq!(port.stats().connections, 1);
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let path = socket_path();
    fs::write(&path, "precious").unwrap();
    let error = VhostUserPort::new(&config(path.clone())).unwrap_err();
    assert!(matches!(error, PortError::Listen(ListenError::NotASocket(_))));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_missing_directory_is_named() {
    let error = VhostUserPort::new(&config("/nonexistent/dir/vm.sock".into())).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("/nonexistent/dir/vm.sock: listen: "), "{text}");
}

#[test]
fn the_socket_file_goes_with_the_port_but_not_somebody_elses() {
    let (first, socket) = port(1);
    drop(first);
    assert!(!socket.exists());
    let (second, socket) = port(1);
    fs::remove_file(&socket).unwrap();
    let other = UnixListener::bind(&socket).unwrap();
    drop(second);
    assert!(socket.exists());
    drop(other);
    fs::remove_file(&socket).unwrap();
}

#[test]
fn mode_owner_and_group_are_set() {
    let socket = socket_path();
    // Our own ids: those of a file that we make.
    fs::write(&socket, "").unwrap();
    let ids = fs::metadata(&socket).unwrap();
    fs::remove_file(&socket).unwrap();
    let access = Access { mode: Some(0o660), uid: Some(ids.uid()), gid: Some(ids.gid()) };
    let _port = VhostUserPort::new(&VhostUserConfig { access, ..config(socket.clone()) }).unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o660);
}

#[test]
fn impossible_ports_are_refused() {
    let base = config(socket_path());
    for queue_pairs in [0, 129] {
        let error = VhostUserPort::new(&VhostUserConfig { queue_pairs, ..base.clone() });
        assert!(matches!(error, Err(PortError::QueuePairs(n)) if n == queue_pairs));
    }
    let error = VhostUserPort::new(&VhostUserConfig { mtu: Some(67), ..base });
    assert!(matches!(error, Err(PortError::Mtu(67))));
}

#[test]
fn a_second_front_end_is_turned_away() {
    let mut world = World::running(LINUX);
    let second = FrontEnd::connect(&mut world.port, &world.socket);
    assert!(second.is_hung_up());
    assert!(world.link().is_some(), "the first one does not notice");
    assert_eq!(world.events(), ["rest Listener"], "the next one waits");
}

#[test]
fn a_front_end_that_was_killed_is_replaced_before_we_heard_of_it() {
    let mut world = World::running(LINUX);
    // Its last message is still unread when it dies.
    world.front.send(Req::GET_FEATURES.into(), 1, &[], &[]);
    let stream = UnixStream::connect(&world.socket).unwrap();
    world.front.hang_up();
    world.port.handle_listener();
    let events = world.events();
    assert!(events.contains(&"link down".to_owned()), "{events:?}");
    assert_eq!(events.last().unwrap(), "disconnected", "what was its has to end first (LIFE-05)");
    world.port.handle_listener();
    assert_eq!(world.events(), ["connected", "watch Connection"]);
    drop(stream);
}

#[test]
fn after_a_disconnect_the_next_one_starts_from_nothing() {
    let mut world = World::running(LINUX);
    world.reconnect();
    assert_eq!(world.port.link(), None);
    assert_eq!(world.port.features(), 0);
    assert!(world.port.fd(Source::Kick(0)).is_none());
    world.negotiate(LINUX);
    world.set_memory();
    world.start_rings();
    assert!(world.link().is_some());
    assert_eq!(world.port.stats().connections, 2);
}

#[test]
fn with_nobody_connected_there_is_no_room_and_no_frame() {
    let (mut port, _socket) = port(1);
    let mut buf = [0; 2000];
    assert_eq!(port.room_to_guest(0, 60), 0);
    assert!(port.poll_from_guest(0, &mut buf).is_none());
    assert!(!port.enable_kicks_from_guest(0));
    assert!(!port.enable_kicks_to_guest(7));
    assert_eq!(port.guest_progress(0), None);
    port.flush_from_guest(0);
    port.handle_connection();
    port.handle_kick(9);
    assert_eq!(port.mtu(), None);
}

#[test]
fn a_front_end_that_waits_behind_some_that_have_gone_is_no_second_one() {
    let (mut port, socket) = port(1);
    for _ in 0..3 {
        drop(UnixStream::connect(&socket).unwrap());
    }
    let stream = UnixStream::connect(&socket).unwrap();
    stream.set_nonblocking(true).unwrap();
    while port.stats().connections < 4 {
        port.handle_listener();
        let events: Vec<_> = std::iter::from_fn(|| port.poll_event()).collect();
        assert!(!events.is_empty(), "somebody comes or goes");
    }
    let answer = (&stream).read(&mut [0; 20]);
    assert_eq!(answer.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nobody has hung up");
}
