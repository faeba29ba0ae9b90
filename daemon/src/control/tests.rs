//! A control thread that stands.

use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, Sender, channel};

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_registry::{Host, Mac, News, Station};

use super::*;
use crate::arena_file;
use crate::worker::WorkerConfig;

/// A registry that does not answer before it is told to: who asks it stands.
#[derive(Debug)]
struct StandingRegistry {
    bell: Bell,
    asked: Sender<()>,
    answers: Receiver<()>,
}

impl Registry for StandingRegistry {
    fn kind(&self) -> &'static str {
        "standing"
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn join(&mut self, _: Host) {}

    fn leave(&mut self, _: u32) {}

    fn claim(&mut self, _: Station) {}

    fn release(&mut self, _: u32, _: Mac) {}

    fn poll(&mut self) -> Option<News> {
        let _ = self.asked.send(());
        let _ = self.answers.recv();
        None
    }
}

#[test]
fn a_control_that_stands_holds_up_neither_the_worker_nor_its_end() {
    let dir = std::env::temp_dir().join(format!("np-stands-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let (arena, _lock) = arena_file::open(&dir.join("arena"), arena_file::size_for(1, 1)).unwrap();
    let engine = Engine::new(monotonic_now(), EngineConfig::new(1, [1, 2, 3, 4]), arena);
    let config = WorkerConfig { busy_poll: Duration::ZERO, epoch: NonZeroU64::MIN };
    let mut worker = Worker::new(&config, engine).unwrap();
    let (bell, (asked, is_asked), (answer, answers)) = (Bell::new().unwrap(), channel(), channel());
    let registry: Box<dyn Registry> =
        Box::new(StandingRegistry { bell: bell.clone(), asked, answers });
    let endpoints = Endpoints { registry: Some(registry), ..Endpoints::default() };
    let (control, mail) = Control::new(endpoints).unwrap();
    let mut thread = control.start(&mail).unwrap();
    worker.set_mail(mail).unwrap();
    bell.ring();
    is_asked.recv().unwrap(); // it stands
    // The worker has its turns, and ends; control does not hear of that.
    (0..100).for_each(|_| worker.turn_at_once().unwrap());
    drop(worker);
    thread.end_max = std::time::Duration::from_millis(10);
    drop(thread);
    answer.send(()).unwrap(); // it still stood
    assert!(is_asked.recv().is_err(), "now it hears that the worker is gone, and ends");
    std::fs::remove_dir_all(&dir).unwrap();
}
