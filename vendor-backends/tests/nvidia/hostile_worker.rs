//! Workers that report what they like.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};
use mdev_core::gpu::{ClientSpec, Gpu};
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::FakeRm;
use vendor_backends::nvidia::NvidiaGpu;
use vendor_backends::nvidia::wire::{FromManager, FromWorker, Report};

use super::{DRIVER, gpu, spec};

/// Plays a worker: answers each request for usage with what `total_ns` returns for the time that
/// has passed.
fn worker(
    gpu: &mut NvidiaGpu,
    spec: &ClientSpec,
    mut total_ns: impl FnMut(Duration) -> u64 + Send + 'static,
) -> JoinHandle<()> {
    let socket = SeqPacket::from(gpu.admit(spec).unwrap().fd.unwrap().into_trusted());
    std::thread::spawn(move || {
        let start = Instant::now();
        let mut buffer = vec![0; MAX_PACKET];
        if socket.send(&encode(&FromWorker::Ready).unwrap(), &[]).is_err() {
            return;
        }
        while let Ok(Some(packet)) = socket.recv(&mut buffer) {
            let Ok(FromManager::Usage(number, _)) = decode(&buffer[..packet.len]) else { continue };
            let total_ns = total_ns(start.elapsed());
            let mut report = Report {
                alive: true,
                had_work_ns: total_ns,
                copying_ns: total_ns,
                ..Report::default()
            };
            report.usage.compute_ns = total_ns;
            report.usage.runnable = true;
            if socket
                .send(&encode(&FromWorker::Usage(number, Box::new(report))).unwrap(), &[])
                .is_err()
            {
                return;
            }
        }
    })
}

#[test]
fn a_lie_is_charged_to_the_liar_and_not_taken_off_others() {
    // What the liar adds to its total with each report: more than can be, and the most there is.
    for lie_ns in [1_000_000, 1_000_000_000_000_000, u64::MAX / 2] {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = gpu(&rm);
        let (liar, honest) = (spec(64 * MIB), spec(64 * MIB));
        let mut told: u64 = 0;
        let threads = [
            worker(&mut gpu, &liar, move |_| {
                told = told.saturating_add(lie_ns);
                told
            }),
            // Has the engine for 90 % of the time.
            worker(&mut gpu, &honest, |passed| passed.as_nanos() as u64 / 10 * 9),
        ];
        let charged = |gpu: &mut NvidiaGpu, spec: &ClientSpec| {
            let report = gpu.usage().unwrap();
            report.vgpus.iter().find(|(vgpu, _)| *vgpu == spec.vgpu).unwrap().1.compute_ns as f64
        };
        while charged(&mut gpu, &honest) == 0.0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (start, before) =
            (Instant::now(), [charged(&mut gpu, &liar), charged(&mut gpu, &honest)]);
        while start.elapsed() < Duration::from_secs(1) {
            gpu.usage().unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
        let after = [charged(&mut gpu, &liar), charged(&mut gpu, &honest)];
        let passed_ns = start.elapsed().as_nanos() as f64;
        let [liar, honest] = [0, 1].map(|index| (after[index] - before[index]) / passed_ns);
        assert!((0.75..0.95).contains(&honest), "{lie_ns}: {honest:.3}, {liar:.3}");
        assert!(liar < 0.4, "{lie_ns}: {honest:.3}, {liar:.3}");
        drop(gpu);
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
