// SPDX-License-Identifier: Apache-2.0
//! The commands: clients are here, long-running commands in their own modules.

use std::path::Path;
use std::time::Duration;

use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{
    self, AttachBody, CapBody, DeviceList, DeviceSocket, LimitBody, ProtectorBody, ReclaimBody,
    VmList, WeightBody,
};
use crate::budget;
use crate::cli::{
    AttachArgs, BlkArgs, Cli, ClientArgs, Command, DpuCommand, GivenCap, InjectArgs, IopfCommand,
    Limit, LogCommand, LogStartArgs, NetArgs, PoolCommand, VmCommand,
};
use crate::client::{Client, ClientError, device_path, injection_path, slo_path, vm_path};
use crate::control::{BlkRequest, DeviceReport, NetRequest, ReclaimReport, VmReport};
use crate::estimate;
use crate::injection::{InjectionReport, InjectionRequest};
use crate::lab;
use crate::letting_go;
use crate::name::check_name;
use crate::pool::{PoolMax, PoolReport};
use crate::protection::recording::{RecordingReport, RecordingRequest};
use crate::run;
use crate::slo::SloList;
use crate::upgrade;
use pagetide_report::outcome::{CommandError, print, print_report};
use pagetide_report::text::Text;

/// Executes the command line.
pub fn execute(cli: Cli) -> Result<(), CommandError> {
    match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Attach(args) => attach(args),
        Command::Upgrade(args) => upgrade::command::execute(&args),
        Command::Vm(command) => vm(command),
        Command::Host(command) => budget::command::host(command),
        Command::Dpu(args) => match args.command {
            Some(command) => dpu(command),
            None => run::run_dpu(args.run),
        },
        Command::Pool(command) => pool(command),
        Command::Iopf(command) => iopf(command),
        Command::Estimate(args) => estimate::run(&args),
        Command::Bench(args) => lab::exec("bench", &args),
        Command::Replay(args) => lab::exec("replay", &args),
        Command::Sim(args) => lab::exec("sim", &args),
        Command::Trace(args) => lab::exec("trace", &args),
        Command::Vpri(args) => lab::exec("vpri", &args),
        Command::Openapi => print(&api::openapi()),
        Command::Successor => upgrade::successor::run(),
        Command::Hold => upgrade::hold::run(),
    }
}

/// An API request: the client, the path, and how the answer is printed.
pub(crate) struct Call<'a> {
    pub(crate) client: &'a ClientArgs,
    pub(crate) method: Method,
    pub(crate) path: String,
}

impl Call<'_> {
    /// Sends `body`, if any, and prints the answer.
    pub(crate) fn make<B: Serialize, T: DeserializeOwned + Serialize + Text>(
        self,
        body: Option<&B>,
    ) -> Result<(), CommandError> {
        let form = self.client.json.into();
        print_report(&self.fetch::<B, T>(body)?, form)
    }

    /// Sends `body`, if any, and returns the answer.
    fn fetch<B: Serialize, T: DeserializeOwned>(self, body: Option<&B>) -> Result<T, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| CommandError::failed(format!("cannot start the client: {error}")))?;
        let client = Client::new(&self.client.api);
        let answer: Result<T, ClientError> = runtime.block_on(async {
            match body {
                Some(body) => client.send(self.method, &self.path, body).await,
                None => client.ask(self.method, &self.path).await,
            }
        });
        answer.map_err(CommandError::from)
    }

    pub(crate) fn ask<T: DeserializeOwned + Serialize + Text>(self) -> Result<(), CommandError> {
        self.make::<(), T>(None)
    }
}

fn attach(args: AttachArgs) -> Result<(), CommandError> {
    let call = Call {
        client: &args.client,
        method: Method::POST,
        path: "/v1/vms".into(),
    };
    call.make::<_, VmReport>(Some(&AttachBody {
        pid: args.pid,
        name: args.name,
        limit_bytes: args.limit.map(|size| size.0),
        weight: args.weight,
        floor_bytes: args.floor.map(|size| size.0),
    }))
}

fn vm(command: VmCommand) -> Result<(), CommandError> {
    match command {
        VmCommand::List { client } => Call {
            client: &client,
            method: Method::GET,
            path: "/v1/vms".into(),
        }
        .ask::<VmList>(),
        VmCommand::Show { name, client } => call_vm(&name, Method::GET, &client)?.ask::<VmReport>(),
        VmCommand::Detach {
            name,
            stop: true,
            client,
        } => {
            let mut call = call_vm(&name, Method::DELETE, &client)?;
            call.path += "/detach";
            call.ask::<VmReport>()
        }
        VmCommand::Detach { name, client, .. } => {
            check_name(&name)?;
            let report = letting_go::detach(&name, &client.api)?;
            print_report(&report, client.json.into())
        }
        VmCommand::Limit {
            name,
            limit,
            client,
        } => {
            let limit_bytes = match limit {
                Limit::None => None,
                Limit::Size(size) => Some(size.0),
            };
            call_vm(&name, Method::PATCH, &client)?
                .make::<_, VmReport>(Some(&LimitBody { limit_bytes }))
        }
        VmCommand::Set(args) => {
            let mut call = call_vm(&args.name, Method::PUT, &args.client)?;
            call.path += "/share";
            call.make::<_, VmReport>(Some(&args.change()))
        }
        VmCommand::Protector {
            name,
            policy,
            client,
        } => {
            let mut call = call_vm(&name, Method::PUT, &client)?;
            call.path += "/protector";
            call.make::<_, VmReport>(Some(&ProtectorBody { policy }))
        }
        VmCommand::Reclaim {
            name,
            bytes,
            client,
        } => {
            let mut call = call_vm(&name, Method::POST, &client)?;
            call.path += "/reclaim";
            let bytes = bytes.map(|size| size.0);
            call.make::<_, ReclaimReport>(Some(&ReclaimBody { bytes }))
        }
    }
}

fn call_vm<'a>(
    name: &str,
    method: Method,
    client: &'a ClientArgs,
) -> Result<Call<'a>, CommandError> {
    check_name(name)?;
    Ok(Call {
        client,
        method,
        path: vm_path(name),
    })
}

fn pool(command: PoolCommand) -> Result<(), CommandError> {
    let call = |client, method| Call {
        client,
        method,
        path: "/v1/pool".into(),
    };
    match command {
        PoolCommand::Show { client } => call(&client, Method::GET).ask::<PoolReport>(),
        PoolCommand::Cap {
            cap: GivenCap::Default,
            client,
        } => call(&client, Method::DELETE).ask::<PoolReport>(),
        PoolCommand::Cap {
            cap: GivenCap::Cap(PoolMax(cap_bytes)),
            client,
        } => call(&client, Method::PUT).make::<_, PoolReport>(Some(&CapBody { cap_bytes })),
    }
}

fn dpu(command: DpuCommand) -> Result<(), CommandError> {
    match command {
        DpuCommand::Blk(args) => add_blk(args),
        DpuCommand::Net(args) => add_net(args),
        DpuCommand::List { client } => Call {
            client: &client,
            method: Method::GET,
            path: "/v1/devices".into(),
        }
        .ask::<DeviceList>(),
        DpuCommand::Slo { device, client } => {
            let device = device.as_deref().map(named_device).transpose()?;
            Call {
                client: &client,
                method: Method::GET,
                path: slo_path(device.as_deref()),
            }
            .ask::<SloList>()
        }
        DpuCommand::Log(command) => log(command),
        DpuCommand::Weight {
            socket,
            weight,
            client,
        } => {
            let call = Call {
                client: &client,
                method: Method::PUT,
                path: path_of_device(&socket)?,
            };
            call.make::<_, DeviceReport>(Some(&WeightBody { weight }))
        }
        DpuCommand::Remove { socket, client } => Call {
            client: &client,
            method: Method::DELETE,
            path: path_of_device(&socket)?,
        }
        .ask::<DeviceSocket>(),
    }
}

/// Path of a device in the API.
fn path_of_device(socket: &Path) -> Result<String, CommandError> {
    let socket = absolute(socket)?;
    let socket = socket.to_str().map(device_path);
    socket.ok_or_else(|| CommandError::refused("the path of the socket is not UTF-8"))
}

fn log(command: LogCommand) -> Result<(), CommandError> {
    let call = |method, client: &ClientArgs| {
        Call {
            client,
            method,
            path: "/v1/log".into(),
        }
        .ask::<RecordingReport>()
    };
    match command {
        LogCommand::Start(args) => start_log(args),
        LogCommand::Status { client } => call(Method::GET, &client),
        LogCommand::Stop { client } => call(Method::DELETE, &client),
    }
}

fn start_log(args: LogStartArgs) -> Result<(), CommandError> {
    let request = RecordingRequest {
        dir: absolute(&args.dir)?,
        device: args.device.as_deref().map(named_device).transpose()?,
        max_file_bytes: args.max_file_bytes.0,
        max_files: args.max_files,
        seconds: args.seconds,
    };
    let call = Call {
        client: &args.client,
        method: Method::POST,
        path: "/v1/log".into(),
    };
    call.make::<_, RecordingReport>(Some(&request))
}

fn iopf(command: IopfCommand) -> Result<(), CommandError> {
    let ask = |method, device: &str, client: &ClientArgs| {
        let path = injection_path(&named_device(device)?);
        Call {
            client,
            method,
            path,
        }
        .ask::<InjectionReport>()
    };
    match command {
        IopfCommand::Inject(args) => inject(&args),
        IopfCommand::Show { device, client } => ask(Method::GET, &device, &client),
        IopfCommand::Stop { device, client } => ask(Method::DELETE, &device, &client),
    }
}

/// Poll interval of `iopf inject --wait`.
const LOOK_EVERY: Duration = Duration::from_millis(200);

fn inject(args: &InjectArgs) -> Result<(), CommandError> {
    let request = InjectionRequest {
        device: named_device(&args.device)?,
        rate: args.rate,
        latency_us: args.latency.0,
        burst: args.burst,
        seconds: args.seconds,
    };
    let client = &args.client;
    let begun: InjectionReport = Call {
        client,
        method: Method::POST,
        path: "/v1/injection".into(),
    }
    .fetch(Some(&request))?;
    let report = if args.wait {
        wait_for_injection(client, &request, begun)?
    } else {
        begun
    };
    print_report(&report, client.json.into())
}

/// Polls until an injection is over and its held faults have resumed.
fn wait_for_injection(
    client: &ClientArgs,
    request: &InjectionRequest,
    mut report: InjectionReport,
) -> Result<InjectionReport, CommandError> {
    let mut looks_left = None;
    loop {
        if report.left_seconds <= 0.0 {
            let held = report.injected_iopfs.saturating_sub(report.resumed);
            let looks_left = looks_left.get_or_insert_with(|| looks_for(held, request.latency_us));
            if held == 0 || *looks_left <= 0.0 {
                return Ok(report);
            }
            *looks_left -= 1.0;
        }
        std::thread::sleep(LOOK_EVERY);
        report = Call {
            client,
            method: Method::GET,
            path: injection_path(&request.device),
        }
        .fetch::<(), _>(None)?;
    }
}

/// Number of polls to wait for faults that are held when an injection ends. They resume one after
/// another, usually within 10 s; never, if their device has stopped.
fn looks_for(held: u64, latency_us: u64) -> f64 {
    let all = Duration::from_micros(held.saturating_mul(latency_us));
    let patience = all.min(Duration::from_secs(10)) + Duration::from_secs(1);
    patience.div_duration_f64(LOOK_EVERY)
}

/// A device as the user names it: a path is made absolute, a serial number stays as it is.
fn named_device(name: &str) -> Result<String, CommandError> {
    if !name.contains('/') && !Path::new(name).exists() {
        return Ok(name.to_owned());
    }
    let path = absolute(Path::new(name))?;
    let path = path.into_os_string().into_string();
    path.map_err(|_| CommandError::refused("the path of the socket is not UTF-8"))
}

fn add_blk(args: BlkArgs) -> Result<(), CommandError> {
    let device = args.device;
    let request = BlkRequest {
        socket: absolute(&args.socket)?,
        image: absolute(&args.image)?,
        queues: args.queues,
        read_only: args.read_only,
        lookup: !device.no_lookup,
        serial: args.serial,
        on_fault: args.on_fault,
        require_sealed: device.require_sealed,
        allow_ram: device.allow_ram,
        ram_max_bytes: device.ram_max.0,
        shared: args.shares.shared,
        raw: args.shares.raw,
        owner: device.owner,
        group: device.group,
        mode: device.mode,
        weight: device.weight,
    };
    let call = Call {
        client: &args.client,
        method: Method::POST,
        path: "/v1/devices".into(),
    };
    call.make::<_, DeviceReport>(Some(&request))
}

fn add_net(args: NetArgs) -> Result<(), CommandError> {
    let device = args.device;
    let request = NetRequest {
        socket: absolute(&args.socket)?,
        link: args.link.link(),
        queues: args.queues,
        on_receive_fault: args.on_receive_fault,
        prefault: !args.no_prefault,
        wire: args.wire,
        backup_bytes: args.backup_bytes.0,
        lookup: !device.no_lookup,
        require_sealed: device.require_sealed,
        allow_ram: device.allow_ram,
        ram_max_bytes: device.ram_max.0,
        owner: device.owner,
        group: device.group,
        mode: device.mode,
        weight: device.weight,
    };
    let call = Call {
        client: &args.client,
        method: Method::POST,
        path: "/v1/devices/net".into(),
    };
    call.make::<_, DeviceReport>(Some(&request))
}

/// The absolute path: the daemon has another working directory.
fn absolute(path: &Path) -> Result<std::path::PathBuf, CommandError> {
    std::path::absolute(path)
        .map_err(|error| CommandError::refused(format!("'{}' is no path: {error}", path.display())))
}
