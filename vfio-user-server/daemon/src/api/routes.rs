//! The table of routes: method, path, level, handler and documentation of every request.
//!
//! The router and the access check are made from [`routes`], docs/openapi.json from [`Document`].
//! Both come from the one table below. A row without a level does not match the macro, and
//! [`Route`] has no constructor without a level.

#![allow(
    dead_code,
    reason = "some types and functions only describe requests for the OpenAPI document"
)]

use utoipa::{IntoResponses, OpenApi};
use vgpud_api::{
    Checkpoint, CreateVgpu, ErrorBody, Focused, Handover, LogWrites, ModifyScheduler, ModifyVgpu,
    OpenConsole, OpenWeb, Parent, ParentTypes, PhysicalScreen, RestoreFile, RestoredVgpu, Rotate,
    SaveVgpu, Scheduler, SchedulerDecision, StartVgpu, Stats, StopVgpu, UndefineVgpu, UpgradedVgpu,
    Version, Vgpu, WebAddress,
};

use super::access::Level;
use super::route::Route;

/// Error responses of all routes.
#[derive(IntoResponses)]
enum ErrorResponses {
    /// The error, if the request is at fault
    #[response(status = "4XX")]
    Request(ErrorBody),
    /// The error, if the host is at fault
    #[response(status = "5XX")]
    Host(ErrorBody),
}

/// Makes [`routes`] and [`Document`] from rows of the form
/// `/// documentation` `LEVEL METHOD "PATH" => MODULE::HANDLER { UTOIPA ATTRIBUTES }`.
macro_rules! table {
    ($(
        $(#[doc = $documentation:tt])+
        $level:ident $method:ident $path:tt => $module:ident::$handler:ident { $($attributes:tt)* }
    )+) => {
        /// Returns all routes of the control API.
        pub fn routes() -> Vec<Route> {
            vec![$(Route::$method($path, Level::$level, super::$module::$handler)),+]
        }

        $(
            $(#[doc = $documentation])+
            #[utoipa::path($method, path = $path, tag = stringify!($module), $($attributes)*)]
            fn $handler() {}
        )+

        /// OpenAPI document of the control API.
        #[derive(Debug, OpenApi)]
        #[openapi(
            info(
                title = "Tessera control API",
                description = "HTTP/1.1 with JSON on vgpud's UNIX socket, <run-dir>/control.sock.",
            ),
            paths($($handler),+)
        )]
        pub struct Document;
    };
}

table! {
    /// Returns the version of the daemon and of the API.
    Read get "/v1/version" => parents::version {
        responses((status = 200, body = Version, description = "The version"))
    }

    /// Returns the physical GPUs.
    Read get "/v1/parents" => parents::parents {
        responses(
            (status = 200, body = Vec<Parent>, description = "All parents"),
            ErrorResponses,
        )
    }

    /// Returns the vGPU types of each physical GPU, with the number of vGPUs of each type that can
    /// still start.
    Read get "/v1/types" => parents::types {
        responses(
            (status = 200, body = Vec<ParentTypes>, description = "The types of all parents"),
            ErrorResponses,
        )
    }

    /// Returns all vGPUs, running, defined or both, ordered by parent and UUID.
    Read get "/v1/vgpus" => vgpus::list {
        responses((status = 200, body = Vec<Vgpu>, description = "All vGPUs"), ErrorResponses)
    }

    /// Defines a vGPU, starts a transient vGPU, or both. The response is sent when the definition
    /// is on disk and the socket of the started vGPU is ready.
    Admin post "/v1/vgpus" => vgpus::create {
        request_body = CreateVgpu,
        responses(
            (status = 201, body = Vgpu, description = "The current state of the vGPU"),
            ErrorResponses,
        )
    }

    /// Returns one vGPU.
    Read get "/v1/vgpus/{vgpu}" => vgpus::show {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses(
            (status = 200, body = Vgpu, description = "The current state of the vGPU"),
            ErrorResponses,
        )
    }

    /// Changes a definition, a running vGPU, or both.
    Admin patch "/v1/vgpus/{vgpu}" => vgpus::modify {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body = ModifyVgpu,
        responses(
            (status = 200, body = Vgpu, description = "The current state of the vGPU"),
            ErrorResponses,
        )
    }

    /// Removes a definition. A running vGPU keeps running until it is stopped.
    Admin delete "/v1/vgpus/{vgpu}" => vgpus::undefine {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<UndefineVgpu>),
        responses((status = 204, description = "The definition is removed"), ErrorResponses)
    }

    /// Starts a defined vGPU. The response is sent when the vGPU's socket is ready.
    Admin post "/v1/vgpus/{vgpu}/start" => vgpus::start {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<StartVgpu>),
        responses(
            (status = 200, body = Vgpu, description = "The current state of the vGPU"),
            ErrorResponses,
        )
    }

    /// Stops a vGPU. A vGPU that a VM uses is stopped only with `force`.
    Admin post "/v1/vgpus/{vgpu}/stop" => vgpus::stop {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<StopVgpu>),
        responses((status = 204, description = "The vGPU is stopped"), ErrorResponses)
    }

    /// Asks the VM of a running vGPU to checkpoint its CUDA programs, which cannot be saved
    /// otherwise: they wait, and their state is in the VM's memory. The VM carries that out while
    /// it runs; ask until it is done. They continue with `resume`, and after a restore.
    Admin post "/v1/vgpus/{vgpu}/checkpoint" => saving::checkpoint {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses(
            (status = 200, body = Checkpoint, description = "Whether the VM has done so"),
            ErrorResponses,
        )
    }

    /// Saves a running vGPU with its VM's view of it: registers, channels and video memory. The
    /// vGPU's work stops until the response is complete. Guest memory is the VM's to save. The
    /// response is a stream that is valid as a whole only with its end.
    Admin post "/v1/vgpus/{vgpu}/save" => saving::save {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<SaveVgpu>),
        responses(
            (status = 200, content_type = "application/vnd.tessera.vgpu", body = Vec<u8>, description = "The saved vGPU"),
            ErrorResponses,
        )
    }

    /// Records from now on which guest memory a running vGPU writes, or ends that. A VM that is
    /// copied while it runs has to be restored with that memory: see `written` of `save`.
    Admin post "/v1/vgpus/{vgpu}/log-writes" => saving::log_writes {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body = LogWrites,
        responses((status = 204, description = "The vGPU's writes are recorded, or no longer"), ErrorResponses)
    }

    /// Restores a saved vGPU into a running vGPU of the same type, whose VM is paused and has the
    /// guest's memory. The vGPU is paused then: see `resume`.
    Admin post "/v1/vgpus/{vgpu}/restore" => saving::restore {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Vec<u8>, content_type = "application/vnd.tessera.vgpu"),
        responses(
            (status = 200, body = RestoredVgpu, description = "What the VM's monitor has to know"),
            ErrorResponses,
        )
    }

    /// Restores as `restore`, from a vGPU in a file. The file is regular, and its descriptor comes
    /// with the first bytes of the request (`SCM_RIGHTS`). Until the connection is accepted,
    /// sending fails with `EPERM`: send again. Several threads read the file. The checksums of
    /// memory are checked while the vGPU is filled: a damaged file leaves a vGPU that was reset.
    Admin post "/v1/vgpus/{vgpu}/restore-file" => saving::restore_file {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<RestoreFile>),
        responses(
            (status = 200, body = RestoredVgpu, description = "What the VM's monitor has to know"),
            ErrorResponses,
        )
    }

    /// Continues the work of a vGPU that a save or restore has left paused, and of CUDA programs
    /// that `checkpoint` has stopped.
    Admin post "/v1/vgpus/{vgpu}/resume" => saving::resume {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses((status = 204, description = "The vGPU works"), ErrorResponses)
    }

    /// Makes a step of a handover of a vGPU to another process of its VM, which is paused. The vGPU
    /// is paused then: see `resume`. Writes to configuration space come with the step `adopt`.
    Admin post "/v1/vgpus/{vgpu}/handover" => saving::handover {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body = Handover,
        responses(
            (status = 200, body = RestoredVgpu, description = "What the VM's monitor has to know"),
            ErrorResponses,
        )
    }

    /// Replaces the worker of a running vGPU by one of this release. The VM does not notice.
    Admin post "/v1/vgpus/{vgpu}/upgrade" => saving::upgrade {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses(
            (status = 200, body = UpgradedVgpu, description = "The worker was replaced"),
            ErrorResponses,
        )
    }

    /// Returns a screenshot of a vGPU. The response is delayed if the screen is requested more
    /// often than its `refresh` allows.
    Admin get "/v1/vgpus/{vgpu}/screenshot" => vgpus::screenshot {
        operation_id = "picture",
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses(
            (status = 200, content_type = "image/png", body = Vec<u8>, description = "The screenshot"),
            ErrorResponses,
        )
    }

    /// Shows a vGPU on its parent's physical screen, and ends a rotation.
    Admin post "/v1/vgpus/{vgpu}/focus" => screens::focus {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        responses(
            (status = 200, body = Focused, description = "The vGPU is on the screen"),
            ErrorResponses,
        )
    }

    /// Starts or ends a rotation, which shows the parent's vGPUs on its physical screen in turn.
    /// vGPUs without a picture are skipped. The change takes effect at once and persists across
    /// restarts of the manager.
    Admin post "/v1/parents/{parent}/rotation" => screens::rotate {
        params(("parent" = String, Path)),
        request_body = Rotate,
        responses(
            (status = 200, body = PhysicalScreen, description = "The current state of the screen"),
            ErrorResponses,
        )
    }

    /// Opens a vGPU's screen. With `Connection: Upgrade` and `Upgrade: rfb`, the connection
    /// switches to RFB (VNC, RFC 6143) without a password, until either side closes the connection.
    Admin post "/v1/vgpus/{vgpu}/console" => consoles::open {
        params(("vgpu" = String, Path, description = "UUID or name of the vGPU")),
        request_body(content = Option<OpenConsole>),
        responses((status = 101, description = "The connection speaks RFB from now on"), ErrorResponses)
    }

    /// Creates an address that opens the web console, once, within five minutes.
    Admin post "/v1/web" => consoles::web {
        request_body(content = Option<OpenWeb>),
        responses((status = 201, body = WebAddress, description = "The address"), ErrorResponses)
    }

    /// Returns entitled and used engine time, memory and limits of every running vGPU.
    Read get "/v1/stats" => statistics::stats {
        responses((status = 200, body = Stats, description = "The statistics"), ErrorResponses)
    }

    /// Returns the schedulers of all physical GPUs.
    Read get "/v1/schedulers" => schedulers::schedulers {
        responses(
            (status = 200, body = Vec<Scheduler>, description = "All schedulers"),
            ErrorResponses,
        )
    }

    /// Returns the scheduler of a physical GPU.
    Read get "/v1/schedulers/{parent}" => schedulers::scheduler {
        params(("parent" = String, Path)),
        responses(
            (status = 200, body = Scheduler, description = "The current state of the scheduler"),
            ErrorResponses,
        )
    }

    /// Changes the scheduler of a physical GPU. The change takes effect at once and persists across
    /// restarts of the manager.
    Admin patch "/v1/schedulers/{parent}" => schedulers::modify_scheduler {
        params(("parent" = String, Path)),
        request_body = ModifyScheduler,
        responses(
            (status = 200, body = Scheduler, description = "The current state of the scheduler"),
            ErrorResponses,
        )
    }

    /// Returns the last decisions of a scheduler, oldest first.
    Read get "/v1/schedulers/{parent}/log" => schedulers::scheduler_log {
        params(("parent" = String, Path)),
        responses(
            (status = 200, body = Vec<SchedulerDecision>, description = "The decisions that are kept"),
            ErrorResponses,
        )
    }

    /// Returns the statistics in Prometheus' text format.
    Read get "/metrics" => statistics::metrics_text {
        responses(
            (status = 200, content_type = "text/plain", body = String, description = "The metrics"),
            ErrorResponses,
        )
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Method;

    use super::*;

    #[test]
    fn every_route_has_its_level() {
        let (get, post, patch) = (Method::GET, Method::POST, Method::PATCH);
        let (read, admin) = (Level::Read, Level::Admin);
        let found: Vec<_> =
            routes().iter().map(|route| (route.method.clone(), route.path, route.level)).collect();
        let expected = [
            (get.clone(), "/v1/version", read),
            (get.clone(), "/v1/parents", read),
            (get.clone(), "/v1/types", read),
            (get.clone(), "/v1/vgpus", read),
            (post.clone(), "/v1/vgpus", admin),
            (get.clone(), "/v1/vgpus/{vgpu}", read),
            (patch.clone(), "/v1/vgpus/{vgpu}", admin),
            (Method::DELETE, "/v1/vgpus/{vgpu}", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/start", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/stop", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/checkpoint", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/save", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/log-writes", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/restore", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/restore-file", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/resume", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/handover", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/upgrade", admin),
            (get.clone(), "/v1/vgpus/{vgpu}/screenshot", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/focus", admin),
            (post.clone(), "/v1/parents/{parent}/rotation", admin),
            (post.clone(), "/v1/vgpus/{vgpu}/console", admin),
            (post, "/v1/web", admin),
            (get.clone(), "/v1/stats", read),
            (get.clone(), "/v1/schedulers", read),
            (get.clone(), "/v1/schedulers/{parent}", read),
            (patch, "/v1/schedulers/{parent}", admin),
            (get.clone(), "/v1/schedulers/{parent}/log", read),
            (get, "/metrics", read),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn routes_that_change_something_need_the_level_admin() {
        for route in routes() {
            assert!(
                route.method == Method::GET || route.level == Level::Admin,
                "{} {}",
                route.method,
                route.path
            );
        }
    }
}
