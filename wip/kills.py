import json,subprocess,sys,random,re,time,collections
exe=sys.argv[1]; lo=int(sys.argv[2]); n=int(sys.argv[3]); budget=float(sys.argv[4]); clean=len(sys.argv)>5
t0=time.time(); tot=collections.Counter(); fails=[]
drop={'Reboot','Destroy','Migrate','Kill','Crash','Handover','FlowFlood','ManyAddresses','DriverReset'}
if clean: drop|={'Pause','OneWay','StopReading','ShrinkWindow','OffloadOff','Drain','Forge','DropDelivered'}
for seed in range(lo,lo+n):
    if time.time()-t0>budget: break
    p=json.loads(subprocess.run([exe,'plan',str(seed)],capture_output=True,text=True).stdout)
    if len(p['conns'])>60: continue
    r=random.Random(seed)
    p['faults']=[f for f in p['faults'] if list(f['kind'].keys())[0] not in drop]
    for r0 in p['remotes']: r0['stack']['quirks']['plain_second_syn']=False
    for r0 in p['guests']: r0['stack']['quirks']['plain_second_syn']=False
    if any(not g['ack_offload'] for g in p['guests']): tot['off']+=1
    # crashes within the busy time
    opens=sorted(c['opens_at'] for c in p['conns']) or [0]
    for k in range(8):
        at=r.choice(opens)+r.randrange(0,400_000_000)
        p['faults'].append({'at':at,'lasts':r.choice([1_000_000,5_000_000,50_000_000,300_000_000]),'kind':{'Crash':{'arena':True,'step':r.randrange(0,60)}}})
    p['faults'].sort(key=lambda f:f['at'])
    f=f'kills/{seed}.json'; json.dump(p,open(f,'w'))
    try: o=subprocess.run([exe,'run','--plan',f,'--out','kills/out'],capture_output=True,text=True,timeout=120)
    except subprocess.TimeoutExpired: tot['slow']+=1; continue
    out=o.stdout+o.stderr
    tot['plans']+=1
    if ' outcome: Reset' in out: tot['withreset']+=1
    for o1 in re.findall(r"outcome: (\w+)",out): tot[o1]+=1
    tot['rc%d'%o.returncode]+=1
    if o.returncode not in (0,13):
        fails.append(seed); print('FAIL',seed,o.returncode,out[:1500],flush=True)
        if len(fails)>80: break
print(dict(tot),fails)
