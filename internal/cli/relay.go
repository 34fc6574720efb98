package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/server"
)

func (a *app) relayCommand() *cobra.Command {
	cfg := config.Default()
	cfg.Relay.Listen = "127.0.0.1:8766"
	c := &cobra.Command{
		Use: "relay", Short: "Hand jobs to daemons on users' machines, or run a hub for them alone", Args: cobra.NoArgs,
		Long: `Runs the hub of coding-relay-v1 alone: daemons connect to --listen with the token of --token-file,
and jobs are handed to them over the HTTP API at --api with the keys of the state directory
(default.key for jobs, admin.key for fences). A full server has the same hub with
"stockade serve --relay-listen ADDR --relay-token-file F".

The commands below work with either. A job that is left, by Ctrl-C, a time-out or a lost
connection, is settled: its daemon acknowledges that the job's processes are gone, or a fence
stands and nothing new starts there until an operator looked.`,
		Example: "  (umask 077; openssl rand -base64 32 > relay.token)\n  stockade relay --listen 127.0.0.1:8766 --token-file relay.token --state ./relay",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return server.RunRelay(ctx, server.Options{Config: cfg, Version: a.Version, Logger: a.logger(cfg.Log.Level, cfg.Log.Format)})
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Relay.Listen, "listen", cfg.Relay.Listen, "address at which daemons connect")
	f.StringVar(&cfg.Relay.TokenFile, "token-file", "", "file with the token that daemons say")
	f.StringVar(&cfg.StateDir, "state", cfg.StateDir, "directory of the keys, the fences and the audit log")
	f.StringVar(&cfg.Relay.Profile, "profile", cfg.Relay.Profile, "shared: the token must be strong; dedicated: on loopback it may be missing")
	f.StringArrayVar(&cfg.Relay.Tools, "tools", nil, "NAME=URL[,key-file=PATH]: MCP server whose tools a job may be granted; repeatable")
	f.StringVar(&cfg.Listen, "api", cfg.Listen, "address of the HTTP API")
	f.IntVar(&cfg.Relay.MaxJobs, "max-jobs", cfg.Relay.MaxJobs, "jobs at a time")
	f.IntVar(&cfg.Relay.MaxDaemons, "max-daemons", cfg.Relay.MaxDaemons, "daemons that are connected or fenced")
	f.Int64Var(&cfg.Relay.MessageBytes, "message-bytes", cfg.Relay.MessageBytes, "largest payload or event")
	f.DurationVar(&cfg.Relay.RunTimeout, "run-timeout", cfg.Relay.RunTimeout, "bounds a job whose request names no time")
	f.DurationVar(&cfg.Relay.CancelTimeout, "cancel-timeout", cfg.Relay.CancelTimeout, "how long a daemon has to acknowledge a cancel")
	f.StringVar(&cfg.Log.Level, "log-level", cfg.Log.Level, "debug, info, warn or error")
	f.StringVar(&cfg.Log.Format, "log-format", cfg.Log.Format, "text or json")
	c.AddCommand(a.relayDaemonsCommand(), a.relayJobsCommand(), a.relayRunCommand(), a.relayCancelCommand(), a.relayFenceCommand())
	return c
}

func (a *app) relayDaemonsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "daemons", Short: "List the daemons that are connected", Args: cobra.NoArgs, Example: "  stockade relay daemons",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			daemons, err := cl.RelayDaemons(cmd.Context())
			if err != nil {
				return err
			}
			return show(a, daemons, []string{"DAEMON", "STATE", "JOBS", "FROM", "CONNECTED", "SEEN"}, func(d client.RelayDaemon, now time.Time) []string {
				state := "ready"
				if d.Fenced {
					state = "FENCED"
				}
				return []string{d.ID, state, fmt.Sprint(len(d.Jobs)), d.Remote, age(now, d.ConnectedAt), age(now, d.LastSeenAt)}
			})
		},
	}
}

func (a *app) relayJobsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "jobs", Short: "List the jobs that are not over", Args: cobra.NoArgs, Example: "  stockade relay jobs",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			jobs, err := cl.RelayJobs(cmd.Context())
			if err != nil {
				return err
			}
			return show(a, jobs, []string{"JOB", "DAEMON", "STATE", "AGE", "EVENTS", "UNREAD", "WAITS"}, func(j client.RelayJobInfo, now time.Time) []string {
				waits := ""
				if j.Waiting {
					waits = "for its reader"
				}
				return []string{j.ID, j.DaemonID, j.State, age(now, j.StartedAt), fmt.Sprint(j.Events), size(j.QueuedBytes + j.SpillBytes), waits}
			})
		},
	}
}

// relayRunOptions are the flags of relay run.
type relayRunOptions struct {
	daemon, agent, payload string
	workspace, command     string
	tools                  string
	allowAll               bool
	timeout, wait          time.Duration
}

func (a *app) relayRunCommand() *cobra.Command {
	var o relayRunOptions
	c := &cobra.Command{
		Use: "run --daemon ID (--agent NAME PROMPT | --payload FILE)", Short: "Run a job on a daemon and print what it says", Args: cobra.MaximumNArgs(1),
		Long: `Hands a job to a daemon and prints the agent's text as it comes; with --json every line of the
API's answer. Either an agent's name and a prompt, or a whole payload from a file (- is standard
input), which is passed on unchanged.

Ctrl-C cancels the job and waits until the daemon confirmed that its processes are gone, or is
fenced; a second Ctrl-C leaves at once, and the server settles the job by itself.

Exit status: 0 the job ended well; 1 the agent failed; 14 the daemon is fenced; 124 the time was
over; 130 cancelled and confirmed; other codes as everywhere.`,
		Example: "  stockade relay run --daemon laptop --agent claude \"mend the failing test\"\n  stockade relay run --daemon laptop --payload job.json --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := a.relayRequest(o, args)
			if err != nil {
				return err
			}
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			defer cl.CloseIdle()
			return a.relayRun(cmd.Context(), cl, req)
		},
	}
	f := c.Flags()
	f.StringVar(&o.daemon, "daemon", "", "id of the daemon")
	f.StringVar(&o.agent, "agent", "", "agent the daemon starts: "+strings.Join(relayAgents, ", "))
	f.StringVar(&o.payload, "payload", "", "file with the payload, a JSON object; - is standard input")
	f.StringVarP(&o.workspace, "workspace", "w", "", "directory on the daemon's machine")
	f.StringVar(&o.command, "command", "", "command that starts the agent there (default: the agent's own name)")
	f.StringVar(&o.tools, "tools", "", "tool set of the relay that the job is granted")
	f.BoolVar(&o.allowAll, "allow-all", false, "let the agent act there without a question, outside the workspace too")
	f.DurationVar(&o.timeout, "timeout", 0, "stop the job after so long (default: the relay's)")
	f.DurationVar(&o.wait, "wait", 30*time.Second, "how long to wait for the daemon to connect")
	return c
}

// maxPayload bounds what is read from a file; the relay has the limit that counts.
const maxPayload = 256 << 20

func (a *app) relayRequest(o relayRunOptions, args []string) (client.RelayJobRequest, error) {
	req := client.RelayJobRequest{DaemonID: o.daemon, TimeoutMillis: o.timeout.Milliseconds(), WaitMillis: o.wait.Milliseconds()}
	if o.tools != "" {
		req.Tools = []string{o.tools}
	}
	if o.daemon == "" {
		return req, errdefs.New(errdefs.Invalid, "no daemon is named").WithNext("give --daemon; stockade relay daemons lists those that are connected")
	}
	switch {
	case o.timeout != 0 && req.TimeoutMillis == 0: // would mean the relay's default
		return req, errdefs.New(errdefs.Invalid, "--timeout is %v, it must be at least 10ms", o.timeout)
	case (o.agent == "") == (o.payload == ""):
		return req, errdefs.New(errdefs.Invalid, "a job is either an agent with a prompt or a payload").WithNext(`give --agent NAME "PROMPT", or --payload FILE`)
	case o.agent != "":
		if len(args) != 1 {
			return req, errdefs.New(errdefs.Invalid, "the agent has no prompt").WithNext("give it as one argument, in quotes")
		}
		var err error
		req.Payload, err = relayPayload(o, args[0])
		return req, err
	case len(args) > 0:
		return req, errdefs.New(errdefs.Invalid, "a payload takes no prompt").WithNext("put it into the payload")
	}
	in := a.Stdin
	if o.payload != "-" {
		f, err := os.Open(o.payload)
		if err != nil {
			return req, errdefs.Wrap(err, errdefs.Invalid, "the payload %s cannot be read: %v", o.payload, fsReason(err))
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxPayload+1))
	switch {
	case err != nil:
		return req, errdefs.Wrap(err, errdefs.Invalid, "the payload cannot be read: %v", fsReason(err))
	case len(b) > maxPayload:
		return req, errdefs.New(errdefs.Invalid, "the payload is larger than %d bytes", maxPayload)
	case !json.Valid(b):
		return req, errdefs.New(errdefs.Invalid, "the payload is not JSON").WithNext("it is one JSON object; see docs/relay.md for the fields of each agent")
	}
	req.Payload = b
	return req, nil
}

// relayRun runs one job and returns the exit status it stands for.
func (a *app) relayRun(ctx context.Context, cl *client.Client, req client.RelayJobRequest) error {
	sigs := make(chan os.Signal, 2)
	signal.Notify(sigs, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(sigs)
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	running := make(chan string, 1) // the job's id, once
	over, joined := make(chan struct{}), make(chan bool, 1)
	go func() { joined <- a.relaySignals(ctx, cl, sigs, running, over, leave) }()
	done := a.progress("waiting for daemon " + req.DaemonID)
	job, err := cl.RunRelayJob(ctx, req)
	done()
	if err == nil {
		running <- job.Info().ID
		err = a.relayFollow(job)
		job.Close()
	}
	close(over)
	if left := <-joined; left && err != nil {
		a.say("left; the server settles the job, if there is one, by itself: see stockade relay jobs")
		return exitError{exitSignalBase + int(syscall.SIGINT)}
	}
	return err
}

// relaySignals cancels the job at the first signal and leaves at the second, or at
// the first while there is no job yet. It returns when over is closed, and says
// whether it left.
func (a *app) relaySignals(ctx context.Context, cl *client.Client, sigs <-chan os.Signal, running <-chan string, over <-chan struct{}, leave func()) bool {
	cancelled := make(chan struct{})
	close(cancelled)
	seen, id, left := 0, "", false
	for {
		select {
		case id = <-running:
		case <-sigs:
			seen++
			if id == "" || seen > 1 {
				left = true
				leave()
				continue
			}
			a.say("cancelling; press Ctrl-C again to leave without waiting")
			cancelled = make(chan struct{})
			go func() {
				defer close(cancelled)
				// Its outcome comes as the job's last line as well.
				if _, err := cl.CancelRelayJob(ctx, id); err != nil && ctx.Err() == nil && !client.IsCode(err, client.NotFound) {
					a.complain(err)
				}
			}()
		case <-over:
			leave()
			<-cancelled
			return left
		}
	}
}

// relayFollow prints the events of a job and judges its outcome.
func (a *app) relayFollow(job *client.RelayJob) error {
	info := job.Info()
	if a.json {
		if err := a.printLine(api.RelayLine{Type: "started", Job: &info}); err != nil {
			return err
		}
	} else {
		a.say("job %s on %s", info.ID, printable(info.DaemonID))
	}
	tell := &relayTeller{out: a.Stdout, say: a.say}
	defer tell.end() // also when the answer is cut off
	for {
		event, err := job.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		tell.note(event)
		if a.json {
			err = a.printLine(api.RelayLine{Type: "event", Event: event})
		} else {
			err = tell.tell(event)
		}
		if err != nil {
			return err
		}
	}
	tell.end()
	o, _ := job.Outcome()
	if a.json {
		if err := a.printLine(api.RelayLine{Type: "outcome", Outcome: &o}); err != nil {
			return err
		}
	}
	return a.relayVerdict(o, tell.failed, info.DaemonID)
}

func (a *app) relayVerdict(o client.RelayOutcome, failed, daemon string) error {
	_, code, _ := strings.Cut(o.Code, ".")
	switch {
	case o.Fence != nil:
		return errdefs.New(errdefs.Fenced, "it is not confirmed that the job is gone (%s): the daemon %s is fenced", printable(o.Fence.Cause), printable(daemon)).
			WithNext("stockade relay fence show %s", o.Fence.Key)
	case code == "daemon_timeout":
		a.say("stockade: the job's time was over; the daemon confirmed that it is gone")
		return exitError{exitDeadline}
	case code == "daemon_cancelled":
		a.say("stockade: the job was cancelled (%s); the daemon confirmed that it is gone", printable(o.Cause))
		return exitError{exitSignalBase + int(syscall.SIGINT)}
	case o.Code != "":
		return errdefs.New(errdefs.Unavailable, "the job was ended: %s (%s)", printable(o.Cause), printable(o.Code))
	case failed != "":
		a.say("stockade: the agent failed: %s", printable(failed))
		return exitError{1}
	}
	return nil
}

func (a *app) relayCancelCommand() *cobra.Command {
	return &cobra.Command{
		Use: "cancel JOB", Short: "Cancel a job and say whether it is gone", Args: cobra.ExactArgs(1),
		Long:    "Answers when the daemon acknowledged that the job's processes are gone (exit status 0), or is fenced (14).\nAn id that begins with a hyphen goes after --.",
		Example: "  stockade relay cancel -- JOB",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			o, err := cl.CancelRelayJob(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				if err := a.printJSON(o); err != nil {
					return err
				}
			} else if o.Acknowledged {
				fmt.Fprintln(a.Stdout, "gone")
			}
			if o.Fence != nil {
				return a.relayVerdict(o, "", o.Fence.DaemonID)
			}
			return nil
		},
	}
}

func (a *app) relayFenceCommand() *cobra.Command {
	c := &cobra.Command{Use: "fence", Short: "Look at the relay's fences, and clear one with a reason", Args: cobra.NoArgs,
		Long: `A fence stands where a daemon did not confirm that a job's processes are gone. The daemon's id
cannot connect or get a job until an operator who looked at its machine clears the fence and says
what was checked. A confirmation that comes late is shown as evidence; it lifts nothing.`}
	ls := &cobra.Command{
		Use: "ls", Short: "List the fences that stand", Args: cobra.NoArgs, Example: "  stockade relay fence ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			fences, err := cl.RelayFences(cmd.Context())
			if err != nil {
				return err
			}
			return show(a, fences, []string{"DAEMON", "AGE", "WHY", "JOBS", "KEY"}, func(f client.RelayFence, now time.Time) []string {
				return []string{f.DaemonID, age(now, f.Since), f.Code, fmt.Sprint(len(f.Jobs)), f.Key[:min(12, len(f.Key))]}
			})
		},
	}
	show := &cobra.Command{
		Use: "show DAEMON", Short: "Show the evidence of a fence, by daemon id or key", Args: cobra.ExactArgs(1), Example: "  stockade relay fence show laptop",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			f, err := a.relayFence(cmd.Context(), cl, args[0])
			if err != nil {
				return err
			}
			return a.showRelayFence(f)
		},
	}
	var reason, id string
	clear := &cobra.Command{
		Use: "clear DAEMON --reason TEXT", Short: "Clear a fence after you checked that nothing runs there", Args: cobra.ExactArgs(1),
		Long: `Clears a fence. The reason says what you checked, is at least 8 characters long, and is kept in the audit record.
With --id only the fence that show printed is cleared, and not one that came since you looked.`,
		Example: `  stockade relay fence clear laptop --reason "the machine was restarted"`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if reason == "" {
				return errdefs.New(errdefs.Invalid, "a fence is cleared only with a reason").WithNext("look at it with stockade relay fence show, then give --reason")
			}
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			f, err := a.relayFence(cmd.Context(), cl, args[0])
			if err != nil {
				return err
			}
			if id == "" {
				id = f.ID
			}
			if f, err = cl.ClearRelayFence(cmd.Context(), f.Key, client.ClearRelayFenceRequest{Fence: id, Reason: reason}); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(f)
			}
			a.say("the fence of %s is cleared; its daemon may connect again", printable(f.DaemonID))
			return nil
		},
	}
	clear.Flags().StringVar(&reason, "reason", "", "what you checked")
	clear.Flags().StringVar(&id, "id", "", "id of the fence that you looked at")
	c.AddCommand(ls, show, clear)
	return c
}

// relayFence finds a fence by its daemon's id, its key, or the beginning of its key.
func (a *app) relayFence(ctx context.Context, cl *client.Client, text string) (client.RelayFence, error) {
	fences, err := cl.RelayFences(ctx)
	if err != nil {
		return client.RelayFence{}, err
	}
	for _, f := range fences {
		if f.DaemonID == text && text != "" {
			return f, nil
		}
	}
	key, err := resolve("fence", "stockade relay fence ls", text, fences, func(f client.RelayFence) string { return f.Key })
	if err != nil {
		return client.RelayFence{}, err
	}
	for _, f := range fences {
		if f.Key == key {
			return f, nil
		}
	}
	return client.RelayFence{}, errdefs.New(errdefs.NotFound, "no fence %q", text)
}

func (a *app) showRelayFence(f client.RelayFence) error {
	if a.json {
		return a.printJSON(f)
	}
	rows := [][]string{{"id", f.ID}, {"daemon", f.DaemonID}, {"since", f.Since.Local().Format(time.DateTime)}, {"why", f.Code + ": " + f.Cause},
		{"jobs", strings.Join(f.Jobs, " ")}, {"from", f.Remote}, {"said", string(f.Metadata)}, {"key", f.Key}}
	for _, l := range f.Late {
		rows = append(rows, []string{"late", "an acknowledgement of " + l.JobID + " came at " + l.At.Local().Format(time.DateTime)})
	}
	return a.table([]string{"FIELD", "VALUE"}, rows)
}
