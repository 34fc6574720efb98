package pluginwire

import "time"

// Scope says which context an action of the control connection must carry.
type Scope int

// The scopes. Each known action from LangBot is in exactly one.
const (
	ScopeUnknown   Scope = iota // not an action of the table: the generic rule
	ScopePing                   // __ping: no context, allowed before the configuration
	ScopeConfig                 // set_runtime_config: no context
	ScopeInstance               // the whole instance: no context
	ScopeWorkspace              // a Workspace context that is no binding
	ScopeCandidate              // a binding that may be newer than the current one
	ScopeTenant                 // the current binding
)

// ControlScope returns the scope of an action that comes from LangBot.
func ControlScope(action string) Scope {
	switch action {
	case ActionPing:
		return ScopePing
	case ActionSetRuntimeConfig:
		return ScopeConfig
	case ActionReconcilePluginInstallations, ActionGetStorageAnalysis:
		return ScopeInstance
	case ActionGetDebugInfo:
		return ScopeWorkspace
	case ActionApplyPluginInstallation, ActionRemovePluginInstallation, ActionFileChunk:
		return ScopeCandidate
	case ActionListPlugins, ActionGetPluginInfo, ActionGetPluginIcon, ActionGetPluginReadme, ActionGetPluginLogs,
		ActionGetPluginAssetsFile, ActionInstallPlugin, ActionRestartPlugin, ActionDeletePlugin, ActionUpgradePlugin,
		ActionEmitEvent, ActionPluginDiagnostic, ActionListTools, ActionCallTool, ActionListCommands, ActionExecuteCommand,
		ActionListAgentRunners, ActionListRunners, ActionRunAgent, ActionRunRunner, ActionRetrieveKnowledge,
		ActionListKnowledgeEngines, ActionRAGIngestDocument, ActionRAGDeleteDocument, ActionRAGOnKBCreate,
		ActionRAGOnKBDelete, ActionGetRAGCreationSettings, ActionGetRAGRetrievalSettings, ActionListParsers,
		ActionParseDocument, ActionPageAPI:
		return ScopeTenant
	}
	return ScopeUnknown
}

// OSSOnly reports whether the action is refused in the shared profile.
func OSSOnly(action string) bool {
	switch action {
	case ActionInstallPlugin, ActionRestartPlugin, ActionDeletePlugin, ActionUpgradePlugin:
		return true
	}
	return false
}

// ControlStream reports whether an action from LangBot is answered with a stream.
func ControlStream(action string) bool {
	switch action {
	case ActionExecuteCommand, ActionRunAgent, ActionRunRunner:
		return true
	}
	return OSSOnly(action)
}

// WorkerTimeout is how long the Runtime waits for a worker: for its answer, or for
// each frame of a stream. From the published SDK 0.7. A runner's time depends on its
// deadline; what stands here for it is the time without one.
func WorkerTimeout(action string) time.Duration {
	switch action {
	case ActionEmitEvent, ActionCallTool, ActionExecuteCommand:
		return 180 * time.Second
	case ActionRunAgent, ActionRunRunner, ActionParseDocument:
		return 300 * time.Second
	case ActionIngestDocument:
		return 1200 * time.Second
	case ActionRetrieveKnowledge:
		return 120 * time.Second
	case ActionPageAPI, ActionDeleteDocument, ActionOnKBCreate, ActionOnKBDelete:
		return 30 * time.Second
	case ActionGetRAGCapabilities:
		return 10 * time.Second
	case ActionPluginDiagnostic:
		return 5 * time.Second
	}
	return DefaultTimeout
}

// Owner says what a storage action of a plugin becomes toward LangBot.
type Owner string

// The owners of stored bytes.
const (
	OwnerNone      Owner = ""          // not a storage action
	OwnerPlugin    Owner = "plugin"    // owner is author/name
	OwnerWorkspace Owner = "workspace" // owner is the Workspace's uuid; refused without one
)

// Forward says how an action of a plugin goes on to LangBot.
type Forward struct {
	Host        string        // the action toward LangBot
	Timeout     time.Duration // for the answer, or for each frame of a stream
	FromPayload bool          // the payload's timeout, in seconds, takes its place and is removed
	Stream      bool          // answered with a stream
	Owner       Owner         // storage: owner_type and owner are added
	File        bool          // the answer names a file that must be pushed on to the plugin under a new key
}

// ForwardOf returns how an action of a plugin goes on, and false for an action that
// does not: the Runtime answers it itself or does not know it.
func ForwardOf(action string) (Forward, bool) {
	f := Forward{Host: action}
	seconds := 15
	switch action {
	case ActionReplyMessage, ActionCallTool, ActionGetBoxStatus, ActionListBoxes, ActionAcquireBox, ActionBindBox,
		ActionImportBoxAttachments, ActionExportBoxFiles:
		seconds = 180
	case ActionGetBotUUID, ActionSetQueryVar, ActionGetQueryVar, ActionGetQueryVars, ActionCreateNewConversation,
		ActionGetLangbotVersion, ActionGetBots, ActionGetBotInfo, ActionSendMessage, ActionGetLLMModels,
		ActionListKnowledgeBases, ActionListPipelineKnowledgeBases, ActionGetConfigFile, ActionGetPrompt,
		ActionEventGet, ActionSteeringPull, ActionStateGet, ActionStateSet, ActionStateDelete, ActionStateList,
		ActionRunGet, ActionRunCancel, ActionRunAppendResult, ActionRunFinalize, ActionRunClaim, ActionRunRenewClaim,
		ActionRunReleaseClaim, ActionRunnerList, ActionRuntimeRegister, ActionRuntimeList, ActionRuntimeStats:
	case ActionCallPlatformAPI:
		// The published Runtime waits 15 s here, though a runner waits 180 s for it: its
		// reply files need them. We wait as long as the caller.
		seconds = 180
	case ActionRuntimeHeartbeat:
		seconds = 10
	case ActionReplyStream, ActionVectorSearch, ActionVectorDelete, ActionVectorList, ActionListParsers,
		ActionGetToolDetail, ActionHistoryPage, ActionHistorySearch, ActionEventPage, ActionRunList,
		ActionRunEventsPage, ActionRuntimeReconcile, ActionRunStats, ActionRunnerStats:
		seconds = 30
	case ActionInvokeEmbedding, ActionInvokeRerank, ActionVectorUpsert:
		seconds = 60
	case ActionGetKnowledgeFileStream:
		seconds, f.File = 60, true
	case ActionRetrieveKnowledge, ActionRetrieveKnowledgeBase:
		seconds = 120
	case ActionInvokeParser:
		seconds = 300
	case ActionCountTokens:
		seconds, f.FromPayload = 30, true
	case ActionInvokeLLM:
		seconds, f.FromPayload = 120, true
	case ActionInvokeLLMStream:
		seconds, f.FromPayload, f.Stream = 120, true, true
	case ActionSetPluginStorage, ActionSetWorkspaceStorage:
		f.Host = ActionSetBinaryStorage
	case ActionGetPluginStorage, ActionGetWorkspaceStorage:
		f.Host = ActionGetBinaryStorage
	case ActionGetPluginStorageKeys, ActionGetWorkspaceStorageKeys:
		f.Host = ActionGetBinaryStorageKeys
	case ActionDeletePluginStorage, ActionDeleteWorkspaceStorage:
		f.Host = ActionDeleteBinaryStorage
	default:
		return Forward{}, false
	}
	switch action {
	case ActionSetPluginStorage, ActionGetPluginStorage, ActionGetPluginStorageKeys, ActionDeletePluginStorage:
		f.Owner = OwnerPlugin
	case ActionSetWorkspaceStorage, ActionGetWorkspaceStorage, ActionGetWorkspaceStorageKeys, ActionDeleteWorkspaceStorage:
		f.Owner = OwnerWorkspace
	}
	f.Timeout = time.Duration(seconds) * time.Second
	return f, true
}
