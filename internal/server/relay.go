package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/dispatch"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/lockdir"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/tenant"
)

// RelayAddressFile is the name of the file, in the state directory, that holds
// the URL at which daemons connect.
const RelayAddressFile = "relay-address"

// relayPart is the relay of a server; nil is a server without one.
type relayPart struct {
	hub     *relay.Hub
	service *dispatch.Service
	at      relay.Endpoint
	address string // file that holds the URL while it listens
	log     *slog.Logger
}

// openRelay makes the hub, with the fences of its directory, if the configuration
// wants one. It does not listen yet.
func openRelay(c config.Config, state string, ledger dispatch.Ledger, log *slog.Logger) (*relayPart, error) {
	if c.Relay.Listen == "" {
		return nil, nil
	}
	token, err := relayToken(c.Relay.TokenFile)
	if err != nil {
		return nil, err
	}
	at, err := relayEndpoint(c.Relay.Listen)
	if err != nil {
		return nil, err
	}
	if token == "" && c.Relay.Profile == string(relay.Shared) {
		return nil, errdefs.New(errdefs.Invalid, "the relay has no token for its daemons").
			WithNext("name a file with --relay-token-file (stockade relay: --token-file); on an address that only you can reach, choose the profile dedicated")
	}
	if at.Token = token; token == "" && !loopback(at.Host) {
		return nil, errdefs.New(errdefs.Invalid, "the relay would listen at %s for daemons without a token", c.Relay.Listen).
			WithNext("name a file with a token with --relay-token-file, or listen on 127.0.0.1")
	}
	sets, err := toolSets(c)
	if err != nil {
		return nil, err
	}
	hub, err := relay.NewHub(relay.HubConfig{
		Token: token, Profile: relay.Profile(c.Relay.Profile), StateDir: filepath.Join(state, "relay"), Logger: log,
		Limits: relaywire.Limits{Jobs: c.Relay.MaxJobs, Daemons: c.Relay.MaxDaemons, MessageBytes: c.Relay.MessageBytes,
			RunTimeout: c.Relay.RunTimeout, HelloTimeout: c.Relay.HelloTimeout, CancelTimeout: c.Relay.CancelTimeout},
	})
	if err != nil {
		return nil, err
	}
	return &relayPart{hub: hub, at: at, address: filepath.Join(state, RelayAddressFile), log: log, service: dispatch.New(dispatch.Config{
		Hub: hub, ToolSets: sets, Workspace: c.Relay.Workspace, MaxPayload: c.Relay.MessageBytes, Ledger: ledger, Logger: log,
	})}, nil
}

// api is the relay as the HTTP API wants it; nil without one.
func (r *relayPart) api() httpapi.Relay {
	if r == nil {
		return nil
	}
	return relayAdapter{r.service}
}

// start opens the listener for daemons and returns its URL, "" without a relay.
func (r *relayPart) start(ctx context.Context) (string, error) {
	if r == nil {
		return "", nil
	}
	url, err := r.hub.Start(ctx, r.at)
	if err != nil {
		return "", err
	}
	if err := secret.WriteFile0600(r.address, []byte(url+"\n")); err != nil {
		r.log.Warn("the relay's address file cannot be written", "err", err)
	}
	r.log.Info("the relay waits for daemons", "url", url)
	return url, nil
}

// stop settles every job, then closes the connections, and ends the sessions with tool
// sets. Stopping twice is harmless.
func (r *relayPart) stop(ctx context.Context) error {
	if r == nil {
		return nil
	}
	_ = os.Remove(r.address)
	err := r.hub.Stop(ctx) // settles every job even when it fails
	r.service.Close()
	return err
}

// relayAdapter gives the API an interface where the service has a type.
type relayAdapter struct{ *dispatch.Service }

func (r relayAdapter) Run(ctx context.Context, p authz.Principal, req api.RelayJobRequest) (httpapi.RelayJob, error) {
	j, err := r.Service.Run(ctx, p, req)
	if err != nil {
		return nil, err // not j: a nil *Job would be a non-nil interface
	}
	return j, nil
}

// relayToken reads the token of daemons, without the line break at its end; ""
// where no file is named. The error never holds what was read.
func relayToken(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	info, err := os.Stat(file)
	if err == nil && info.Size() > secret.MaxFile {
		return "", errdefs.New(errdefs.Invalid, "the relay's token file %s has %d bytes: it is no token", file, info.Size())
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(file)
	}
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Invalid, "the relay's token file cannot be read: %v", err).
			WithNext("make one with: (umask 077; openssl rand -base64 32 > %s)", file)
	}
	token := strings.TrimRight(string(b), "\r\n")
	if token == "" {
		return "", errdefs.New(errdefs.Invalid, "the relay's token file %s is empty", file).
			WithNext("make one with: (umask 077; openssl rand -base64 32 > %s)", file)
	}
	return token, nil
}

func relayEndpoint(listen string) (relay.Endpoint, error) {
	host, port, err := net.SplitHostPort(listen)
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil {
		return relay.Endpoint{}, errdefs.New(errdefs.Invalid, "the relay's address %q is not HOST:PORT", listen).
			WithNext("write one like 127.0.0.1:8766")
	}
	if host == "" {
		host = "::" // as with --listen: every address of this machine
	}
	return relay.Endpoint{Host: host, Port: int(n)}, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

// RunRelay serves a relay alone until ctx ends: the hub, and the part of the HTTP
// API that is about it. Of the configuration it uses StateDir, Listen (of the API)
// and Relay. There is no ledger: the state directory holds one admin key and one
// key of the relay's workspace, and the hub's own audit log.
func RunRelay(ctx context.Context, o Options) (err error) {
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	state, err := openStateDir(o.Config.StateDir)
	if err != nil {
		return err
	}
	defer state.Close()
	part, err := openRelay(o.Config, state.Path, nil, log)
	if err != nil {
		return err
	}
	if part == nil {
		return errdefs.New(errdefs.Invalid, "the relay has no address for daemons").WithNext("give one with --listen")
	}
	// Deferred as well as below: everything that fails before the end leaves no hub.
	defer func() { err = errors.Join(err, part.stop(context.WithoutCancel(ctx))) }()
	keys, err := openRelayKeys(state, o.Config.Relay.Workspace)
	if err != nil {
		return err
	}
	handler, err := httpapi.New(httpapi.Config{Tenants: keys, Relay: part.api(), Version: o.Version, Logger: log})
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Config.Listen)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the address %s cannot be listened on: %v", o.Config.Listen, opReason(err)).
			WithNext("choose another with --api")
	}
	if _, err := part.start(ctx); err != nil {
		return errors.Join(err, listener.Close())
	}
	// Callers whose jobs are being settled hear how that went.
	front := &apiServer{state: state, handler: handler, options: o, log: log, drain: drainTime + o.Config.Relay.CancelTimeout}
	return front.serve(ctx, listener, func() {})
}

// relayKeys are the two credentials of a relay that stands alone. Of the tenants
// of a server it only knows who is calling; the API of a relay asks for no more.
type relayKeys struct {
	httpapi.Tenants // nil
	admin, user     relayKey
	workspace       string
}

type relayKey struct {
	id   string
	hash [32]byte
}

// openRelayKeys reads the keys of the state directory, and makes those that are
// missing before anything listens.
func openRelayKeys(state *lockdir.Dir, workspace string) (*relayKeys, error) {
	k := &relayKeys{workspace: workspace}
	for name, to := range map[string]*relayKey{tenant.AdminKeyFile: &k.admin, tenant.DefaultKeyFile: &k.user} {
		path := state.File(name)
		text, err := tenant.ReadKey(path)
		if errdefs.Is(err, errdefs.NotFound) {
			text, _ = secret.NewKey(secret.ID(ident.Key))
			err = secret.CreateFile0600(path, []byte(text+"\n"))
		}
		if err != nil {
			return nil, err
		}
		_, to.id, to.hash, _ = secret.Parse(text)
	}
	if k.admin.hash == k.user.hash {
		return nil, errdefs.New(errdefs.Invalid, "%s and %s of %s hold the same key", tenant.AdminKeyFile, tenant.DefaultKeyFile, state.Path).
			WithNext("remove one; it is made anew")
	}
	return k, nil
}

// Authenticate says whose key it is.
func (k *relayKeys) Authenticate(_ context.Context, credential string) (authz.Principal, error) {
	_, id, hash, ok := secret.Parse(credential)
	switch {
	case ok && secret.Equal(hash, k.admin.hash):
		return authz.Principal{Kind: authz.Admin, Key: id}, nil
	case ok && secret.Equal(hash, k.user.hash):
		return authz.Principal{Kind: authz.Workspace, Key: id, Workspace: k.workspace}, nil
	}
	return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the credential is not known").
		WithNext("use admin.key or default.key of the relay's state directory")
}

// toolSets reads what the operator registered, with the keys.
func toolSets(c config.Config) (map[string]dispatch.ToolSet, error) {
	entries, err := c.ParseTools()
	if err != nil {
		return nil, err
	}
	sets := map[string]dispatch.ToolSet{}
	for _, e := range entries {
		key, err := e.ReadKey()
		if err != nil {
			return nil, err
		}
		sets[e.Name] = dispatch.ToolSet{URL: e.BaseURL, Key: key}
	}
	return sets, nil
}
