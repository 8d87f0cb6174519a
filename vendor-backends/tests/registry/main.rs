//! Promise to authors of backends: a backend is one folder and one line in the list of backends.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod dummy;

use std::thread;
use std::time::Duration;

use ipc::seqpacket::SeqPacketListener;
use mdev_core::gpu::{ClientSpec, Gpu};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use vendor_backends::backend::{BACKENDS, Backend, Opener, Registry};
use vendor_backends::mediator::{MediatedGpu, server};
use vendor_backends::soft::SoftBackend;

/// The one line.
static WITH_DUMMY: Registry = Registry::new(&[&SoftBackend, &dummy::DummyBackend]);

#[test]
fn a_dummy_backend_serves_a_vgpu_from_its_parent_argument() {
    let parent = WITH_DUMMY.parse("dummy:d0").unwrap();
    assert_eq!((parent.name(), parent.argument().as_str()), ("d0", "dummy:d0"));
    let Opener::Process(opener) = parent.opener() else { panic!("it has a GPU process") };
    let hardware = opener.open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.sock");
    let listener = SeqPacketListener::bind(&socket).unwrap();
    thread::spawn(move || server::run(hardware, Duration::from_millis(100), &listener));
    let mut gpu = MediatedGpu::connect(&socket).unwrap();
    assert_eq!(gpu.describe().model, "DUMMY");
    let admission = gpu
        .admit(&ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: MIB,
            framebuffer_bytes: 0,
            max_channels: 1,
            max_import_bytes: MIB,
        })
        .unwrap();
    let client = WITH_DUMMY.open_client(
        admission.backend,
        admission.fd.unwrap().into_trusted(),
        None,
        &mut |_| None,
    );
    assert_eq!(client.unwrap().unwrap().gpu().name, "Dummy device");
}

#[test]
fn an_unknown_prefix_names_the_backends_that_exist() {
    let error = WITH_DUMMY.parse("voodoo:v0").unwrap_err();
    assert_eq!(error, "begin with \"soft\" or \"dummy\", as in soft:soft0,vram=8G or dummy:d0");
}

#[test]
fn every_backend_has_its_own_prefix_and_parses_its_own_example() {
    let mut names: Vec<_> = BACKENDS.iter().map(Backend::name).collect();
    for backend in BACKENDS.iter() {
        let parent = BACKENDS.parse(backend.example()).unwrap();
        assert_eq!(parent.backend().name(), backend.name());
        let again = BACKENDS.parse(&parent.argument()).unwrap();
        assert_eq!((again.name(), again.argument()), (parent.name(), parent.argument()));
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), BACKENDS.iter().count());
}
